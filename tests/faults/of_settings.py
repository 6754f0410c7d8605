"""Settings that a database may have had for years: one after the other, under load."""

from __future__ import annotations

from faults.fault_run import Scene, fault

SETTINGS: dict[str, dict[str, str]] = {
    "time zone": {"TimeZone": "Asia/Kathmandu"},
    "dates": {"DateStyle": "SQL, DMY"},
    "intervals": {"IntervalStyle": "sql_standard"},
    "search path": {"search_path": ""},
    "generic plans": {"plan_cache_mode": "force_generic_plan"},
    "no triggers": {"session_replication_role": "replica"},
    "serializable": {"default_transaction_isolation": "serializable"},
    "deferrable": {"default_transaction_deferrable": "on"},
    "null equals": {"transform_null_equals": "on"},
    "old strings": {"standard_conforming_strings": "off", "escape_string_warning": "off"},
    "few digits": {"extra_float_digits": "-15", "bytea_output": "escape"},
    "arrays": {"array_nulls": "off"},
    "variables": {"plpgsql.variable_conflict": "use_column"},
    "compiled": {"jit": "on", "jit_above_cost": "0"},
    "no indexes": {"enable_indexscan": "off", "enable_bitmapscan": "off"},
}
"""What `tests/settings.py` runs the tests of the functions under, too."""

SERIALIZATION_FAILURE = "40001"


EVERYBODY = """
select count(pg_terminate_backend(a.pid))
from pg_stat_activity as a
where a.datname = current_database() and a.pid <> pg_backend_pid()
"""


@fault("settings", "settings of the database", len(SETTINGS), minutes=5)
def settings(scene: Scene) -> None:
    """Give the database each of the settings, and let everybody connect again."""
    scene.general.add(SERIALIZATION_FAILURE)
    scene.times = len(SETTINGS)  # at any scale
    with scene.load() as load:
        database = load.ask("select quote_ident(current_database())")
        for number in scene.rounds():
            load.execute(f"alter database {database} reset all")
            for name, value in list(SETTINGS.values())[number].items():
                load.execute(f"alter database {database} set {name} to '{value}'")
            load.ask(EVERYBODY)
            load.pause(max(1.0, 20.0 * scene.scale))
        load.execute(f"alter database {database} reset all")
        load.ask(EVERYBODY)

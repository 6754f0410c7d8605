/*
 * tables/manifest.sql -- what the install has made, as it made it.
 *
 * operations/drift.sql compares it with the current state.
 */

create table rota.manifest (
    kind text collate "C" not null,
    name text collate "C" not null,
    definition text,
    is_drifted boolean not null default false,

    constraint manifest_pkey primary key (kind, name)
);

comment on table rota.manifest is
    'Tables, columns, indexes, constraints, triggers, policies, views and functions as '
    'installed.';
comment on column rota.manifest.definition is
    'What makes it, or a hash of that; null for what was there and not of the install.';
comment on column rota.manifest.is_drifted is
    'Whether it differed when the last upgrade began, which then did not record it anew.';

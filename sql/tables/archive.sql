/*
 * tables/archive.sql -- where retention moves old rows.
 */

create table rota.archive (
    is_on boolean primary key default true,
    schema text collate "C" not null,

    constraint archive_is_on_check check (is_on)
);

comment on table rota.archive is
    'Where retention moves the history instead of deleting it, if set.';
comment on column rota.archive.schema is 'A schema of the owner of rota.';

/*
 * tables/schema.sql -- the one schema that holds everything.
 *
 * A plain create: if another role made a schema of this name beforehand, the install must stop
 * rather than put functions that run with the owner's rights among another role's objects.
 */

create schema rota;

comment on schema rota is
    'Background jobs: call the functions, read the views, leave the tables alone.';

# flatten.awk -- turn the manifest and its parts into one plain SQL file.
#
#     awk -v vars="fresh with_roles" -f sql/flatten.awk sql/install.sql
#
# The result needs no psql: any driver or editor can run it.  Followed are the few psql
# lines that the manifest uses: \ir (relative to the file it stands in), \if :name and
# \if :{?name} (true for a name in vars), \else and \endif.  \set lines and one-line queries
# that end in \gset are dropped, because they only feed those conditions: :todo of a step
# in upgrades/all.sql is true unless `-v applied="1 2"` has the step's id.  Anything else that
# begins with a backslash is an error, so no new word in the manifest can slip through.

BEGIN {
    if (ARGC != 2) fail("usage: awk -v vars=\"name ...\" -f flatten.awk FILE")
    count = split(vars, names, " ")
    for (i = 1; i <= count; i++) is_set[names[i]] = 1
    count = split(applied, names, " ")
    for (i = 1; i <= count; i++) is_applied[names[i]] = 1
    depth = 0
    flatten(ARGV[1])
}

function flatten(file,    line, status, folder, bottom) {
    folder = file
    if (!sub("/[^/]*$", "/", folder)) folder = ""
    bottom = depth
    while ((status = (getline line < file)) > 0) {
        if (line ~ /^[ \t]*\\(if|elif|else|endif)/) condition(line, file)
        else if (!is_live()) continue
        else if (line ~ /^[ \t]*\\ir /) flatten(folder word(line))
        else if (line ~ /^[ \t]*\\set /) continue
        else if (line ~ /^[ \t]*select .*\\gset[ \t]*$/) look_up(line)
        else if (line ~ /^[ \t]*\\/ || line ~ /^[^*-]*[ \t]\\g[a-z]*[ \t]*$/) {
            fail(file ": cannot flatten: " line)
        }
        else print line
    }
    if (status < 0) fail("cannot read " file)
    close(file)
    if (depth != bottom) fail(file ": \\if without \\endif")
}

function condition(line, file,    name) {
    if (line ~ /\\endif/) {
        if (depth-- == 0) fail(file ": \\endif without \\if")
    } else if (line ~ /\\else/) {
        if (depth == 0) fail(file ": \\else without \\if")
        taken[depth] = !taken[depth]
    } else if (match(line, /:(\{\?[a-z_]+\}|[a-z_]+)[ \t]*$/)) {
        name = substr(line, RSTART + 1)
        gsub(/[^a-z_]/, "", name)
        taken[++depth] = (name in is_set)
    } else {
        fail(file ": cannot flatten: " line)
    }
}

function look_up(line) {
    if (!match(line, /where id = [0-9]+\) as todo /)) return
    line = substr(line, RSTART + 11)
    if (line + 0 in is_applied) delete is_set["todo"]
    else is_set["todo"] = 1
}

function is_live(    level) {
    for (level = 1; level <= depth; level++) if (!taken[level]) return 0
    return 1
}

function word(line) {
    sub(/^[ \t]*\\[a-z]+[ \t]+/, "", line)
    sub(/[ \t]+$/, "", line)
    return line
}

function fail(message) {
    print "flatten.awk: " message > "/dev/stderr"
    exit 1
}

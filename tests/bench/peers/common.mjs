// What the programs in JavaScript share; see common.py for the steps and their environment.

import { closeSync, openSync, statSync, writeSync } from "node:fs";

export const url = process.env.DATABASE_URL;
export const jobs = Number(process.env.BENCH_JOBS ?? 0);
export const setting = (name, otherwise) => Number(process.env[`BENCH_${name}`] ?? otherwise);
const file = process.env.BENCH_FILE ?? "/dev/null";

export const isListening = !statSync(file, { throwIfNoEntry: false })?.isDirectory();
let hasBegun = false;

export function begin() {
    if (!hasBegun) {
        hasBegun = true;
        closeSync(openSync(`${file}/${process.pid}`, "w"));
    }
}

export function times() {
    const opened = openSync(file, "a");
    return (number) => {
        const now = Math.round((performance.timeOrigin + performance.now()) * 1000);
        writeSync(opened, `${number} ${now}000\n`);
    };
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export async function* pace() {
    const end = performance.now() + setting("SECONDS", 0) * 1000;
    let due = performance.now();
    for (let number = setting("FIRST", 0); due < end; number++) {
        yield number;
        due += 15 + 10 * Math.random();
        await sleep(Math.max(0, due - performance.now()));
    }
}

export const told = () => new Promise((resolve) => process.once("SIGTERM", resolve));

export async function main(steps) {
    await steps[process.argv[2]]();
    process.exit(0);
}

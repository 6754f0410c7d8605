// pg-boss: its own polling workers, fetching without a pause while batches come back full.

import { PgBoss } from "pg-boss";

import { begin, isListening, jobs, main, pace, setting, times, told, url } from "./common.mjs";

const queue = "noop";
const chunk = 5000;

async function start() {
    const boss = new PgBoss({
        connectionString: url,
        max: setting("POOL", 10),
        useListenNotify: Boolean(setting("NOTIFY", 1)),
    });
    boss.on("error", console.error);
    await boss.start();
    return boss;
}

async function fill() {
    const boss = await start();
    await boss.createQueue(queue, {
        notify: Boolean(setting("NOTIFY", 1)),
        partition: Boolean(setting("PARTITION", 0)),
    });
    for (let first = 0; first < jobs; first += chunk) {
        const size = Math.min(chunk, jobs - first);
        await boss.insert(queue, Array.from({ length: size }, (_, i) => ({ data: { n: first + i } })));
    }
    await boss.stop();
}

async function work() {
    const add = isListening ? times() : null;
    const boss = await start();
    const handler = async (batch) => {
        for (const job of batch) {
            if (add) add(job.data.n);
            else begin();
        }
    };
    const options = {
        batchSize: setting("BATCH", 500),
        localConcurrency: setting("CONCURRENCY", 2),
        pollingIntervalSeconds: 0.5,
        burstWhenBatchFull: true,
    };
    await boss.work(queue, options, handler);
    await told();
    await boss.stop();
}

async function produce() {
    const boss = await start();
    const add = times();
    for await (const n of pace()) {
        add(n);
        await boss.send(queue, { n });
    }
    await boss.stop();
}

await main({ fill, work, listen: work, produce });

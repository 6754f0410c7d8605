// Graphile Worker: its runner as a library, with the preset of its own performance test.

import { Logger, makeWorkerUtils, run } from "graphile-worker";

import { begin, isListening, jobs, main, pace, setting, times, told, url } from "./common.mjs";

const logger = new Logger(() => () => {});
const concurrentJobs = setting("CONCURRENCY", 24);
const batched = {
    localQueue: { size: setting("LOCAL_QUEUE", 500), refetchDelay: { durationMs: 10 } },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
};
const preset = {
    worker: {
        connectionString: url,
        concurrentJobs,
        maxPoolSize: concurrentJobs + 1,
        ...(setting("BATCHED", 1) ? batched : {}),
    },
};

async function fill() {
    const utils = await makeWorkerUtils({ connectionString: url, logger });
    await utils.migrate();
    await utils.withPgClient((client) =>
        client.query(
            `select graphile_worker.add_jobs(array(
                select json_populate_record(null::graphile_worker.job_spec,
                    json_build_object('identifier', 'noop', 'payload', json_build_object('n', n)))
                from generate_series(1, $1::int) as g (n)))`,
            [jobs],
        ),
    );
    await utils.release();
}

async function work() {
    const add = isListening ? times() : null;
    const noop = async (payload) => (add ? add(payload.n) : begin());
    const runner = await run({ preset, logger, taskList: { noop }, noHandleSignals: true });
    await told();
    await runner.stop();
}

async function produce() {
    const utils = await makeWorkerUtils({ connectionString: url, logger });
    const add = times();
    for await (const n of pace()) {
        add(n);
        await utils.addJob("noop", { n });
    }
    await utils.release();
}

await main({ fill, work, listen: work, produce });

// Plots that tell what is under the pointer and can be zoomed, in place of the server's pictures.
// Without this file the pictures and the tables under them tell the same.
(function () {
  "use strict";
  const HEIGHT = 190, DEAD = 4, NEAR = 7, DAY = 86400;
  const LENGTHS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60,
    120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000];
  const COUNTS = [1, 2, 5].flatMap((n) => [...Array(12).keys()].map((power) => n * 10 ** power))
    .sort((one, other) => one - other);
  const { span, isLocal } = window.rota;
  const drawn = new Map();

  // Colours are those of the page, light or dark.
  let colors = {};
  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    colors = {
      succeeded: of("good"), failures: of("warn"), dead: of("bad"), half: of("accent"),
      most: of("accent") + "59", mark: of("violet"), line: of("line"), quiet: of("quiet"),
    };
  }

  function moment(at, step) {
    const date = new Date(at * 1000), pad = (n) => String(n).padStart(2, "0");
    const [month, day, hour, minute] = isLocal()
      ? [date.getMonth() + 1, date.getDate(), date.getHours(), date.getMinutes()]
      : [date.getUTCMonth() + 1, date.getUTCDate(), date.getUTCHours(), date.getUTCMinutes()];
    const told = step < DAY ? ` ${pad(hour)}:${pad(minute)}` : "";
    return `${pad(month)}-${pad(day)}${told}${isLocal() ? "" : " UTC"}`;
  }
  const number = (value) => value.toLocaleString("en").replaceAll(",", "\u202f");
  const length = (seconds) =>
    seconds && seconds < 1 ? `${Math.round(seconds * 1000)} ms` : span(seconds) || "0";

  // Bars that stand on each other are drawn from the highest to the lowest.
  function columns(plot) {
    const at = plot.values[0].map((_, place) => plot.begin + (place + 0.5) * plot.step);
    const [first, second] = plot.values;
    const high = plot.kind === "stacked"
      ? first.map((value, place) => (value ?? 0) + (second[place] ?? 0)) : second;
    return [at, high, first];
  }

  class Chart {
    constructor(place) {
      this.place = place;
      this.read();
      place.replaceChildren();
      this.told = document.createElement("p");
      this.told.className = "told";
      place.append(this.told);
      this.chart = new uPlot(this.options(), columns(this.plot), place);
      this.chart.root.setAttribute("role", "img");
      this.chart.root.setAttribute("aria-label", place.dataset.title);
      this.tell(this.chart);
      this.size = new ResizeObserver(() => {
        const width = place.clientWidth;
        if (width && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
      });
      this.size.observe(place);
    }
    read() {
      this.text = this.place.dataset.plot;
      this.plot = JSON.parse(this.text);
    }
    get end() { return this.plot.begin + this.plot.step * this.plot.values[0].length; }
    options() {
      const isTimes = this.plot.kind === "times";
      const tell = isTimes ? length : number;
      const bars = uPlot.paths.bars({ size: [0.86, Infinity], gap: 0 });
      const [high, low] = isTimes ? ["most", "half"] : ["failures", "succeeded"];
      const font = `12px ${getComputedStyle(document.body).fontFamily}`;
      const axis = {
        font, stroke: () => colors.quiet, ticks: { show: false },
        grid: { stroke: () => colors.line, width: 1 },
      };
      return {
        width: this.place.clientWidth, height: HEIGHT, padding: [6, 4, 0, 0],
        legend: { show: false }, focus: { prox: -1 },
        tzDate: (at) => isLocal() ? new Date(at * 1000)
          : uPlot.tzDate(new Date(at * 1000), "Etc/UTC"),
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: 8 } },
        scales: {
          // All of the time is shown, unless a part of it was chosen.
          x: {
            range: (_, from, to) => {
              const { begin, step } = this.plot, half = step / 2;
              const isAll = from === null || (from <= begin + half && to >= this.end - half);
              return isAll ? [begin, this.end] : [from, to];
            },
          },
          y: { range: (_, __, most) => [0, Math.max(most ?? 0, isTimes ? 0.001 : 4) * 1.04] },
        },
        axes: [
          {
            ...axis, space: 64, size: 34, gap: 12,
            values: (_, places, __, ___, step) => places.map((at) => at === null ? null
              : moment(at, step).replace(" UTC", "").slice(step < DAY ? 6 : 0)),
          },
          {
            ...axis, size: (u, texts) => Math.max(...(texts ?? [""]).map((t) => t.length)) * 7 + 10,
            space: 34, gap: 4, incrs: isTimes ? LENGTHS : COUNTS,
            values: (_, places) => places.map((value) => value === null ? null : tell(value)),
          },
        ],
        series: [
          {},
          ...[high, low].map((name) => (
            { paths: bars, points: { show: false }, width: 0, fill: () => colors[name] })),
        ],
        hooks: {
          draw: [(u) => this.mark(u)],
          setCursor: [(u) => this.tell(u)],
          setScale: [(u) => this.tell(u)],
          ready: [(u) => this.feel(u)],
        },
      };
    }
    // What is no bar: dead jobs below the line, and a line for each deploy.
    mark(u) {
      const { ctx, bbox } = u, ratio = devicePixelRatio, { plot } = this;
      const isSeen = (at) => at >= u.scales.x.min && at <= u.scales.x.max;
      ctx.save();
      ctx.fillStyle = colors.dead;
      const wide = Math.abs(u.valToPos(plot.begin + plot.step, "x", true)
        - u.valToPos(plot.begin, "x", true)) * 0.86;
      (plot.values[2] ?? []).forEach((dead, place) => {
        const at = u.data[0][place];
        if (!dead || !isSeen(at)) return;
        const x = u.valToPos(at, "x", true) - wide / 2;
        ctx.fillRect(x, bbox.top + bbox.height + 3 * ratio, wide, DEAD * ratio);
      });
      ctx.strokeStyle = colors.mark;
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      for (const [at] of plot.marks) {
        if (!isSeen(at)) continue;
        const x = Math.round(u.valToPos(at, "x", true));
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    }
    tell(u) {
      const { idx, left } = u.cursor, { plot, place } = this;
      if (idx === null || idx === undefined || left < 0) {
        const isZoomed = u.scales.x.min > plot.begin || u.scales.x.max < this.end;
        const isFinger = matchMedia("(pointer: coarse)").matches;
        this.told.textContent =
          place.dataset[isZoomed ? "zoomed" : isFinger ? "finger" : "pointer"];
        return;
      }
      const tell = plot.kind === "times" ? length : number;
      const values = plot.values.map((row) => row[idx]);
      const parts = values.every((value) => value === null) ? [place.dataset.nothing]
        : plot.names.map((name, row) => `${name} ${tell(values[row] ?? 0)}`);
      const time = moment(plot.begin + idx * plot.step, plot.step);
      const near = plot.marks.filter(([at]) => Math.abs(u.valToPos(at, "x") - left) <= NEAR)
        .map(([at, text]) => `${moment(at, 60)}: ${text}`);
      this.told.textContent = [`${time}: ${parts.join(", ")}`, ...near].join(" · ");
    }
    // A finger reads as it moves sideways, and scrolls the page as it moves up and down.
    feel(u) {
      const hold = (isHeld) => () => { this.place.toggleAttribute("data-held", isHeld); };
      u.over.addEventListener("mousedown", hold(true));
      document.addEventListener("mouseup", hold(false));
      const read = (event) => {
        if (event.pointerType === "mouse") return;
        const box = u.over.getBoundingClientRect();
        u.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
      };
      u.over.addEventListener("pointerdown", read);
      u.over.addEventListener("pointermove", read);
    }
    fresh() {
      const u = this.chart, { min, max } = u.scales.x;
      const wasAll = min <= this.plot.begin && max >= this.end;
      if (this.text === this.place.dataset.plot) return this.tell(u);
      this.read();
      u.setData(columns(this.plot), wasAll);
      if (!wasAll) u.setScale("x", { min, max });
      return this.tell(u);
    }
    stop() { this.size.disconnect(); this.chart.destroy(); }
  }

  // Live pages keep the chart, and whatever part of it was chosen.
  function draw() {
    for (const [place, chart] of drawn) {
      if (!place.isConnected) { chart.stop(); drawn.delete(place); }
    }
    for (const place of document.querySelectorAll(".chart[data-plot]")) {
      const chart = drawn.get(place);
      if (chart && JSON.parse(place.dataset.plot).kind === chart.plot.kind) chart.fresh();
      else drawn.set(place, new Chart(place));
    }
  }
  function redraw() {
    readColors();
    for (const chart of drawn.values()) { chart.chart.redraw(true, true); chart.tell(chart.chart); }
  }
  readColors();
  draw();
  document.addEventListener("rota:fresh", draw);
  document.addEventListener("rota:theme", redraw);
  document.addEventListener("rota:zone", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();

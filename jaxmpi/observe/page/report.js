/* Draws the curves of a report from the JSON that stands in the page. No markup is made of its texts. */
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  root.classList.add("js");

  const HUES = {
    light: [
      "#1d5fd1",
      "#d9580d",
      "#0a8a5f",
      "#b3209e",
      "#cc2222",
      "#0c7f99",
      "#7040d8",
      "#8a6100",
      "#56616e",
      "#5a8208",
    ],
    dark: [
      "#6aa8ff",
      "#ff9a4d",
      "#3fd6a0",
      "#ee86e0",
      "#ff7b7b",
      "#3ccbe6",
      "#b39bff",
      "#e6be3c",
      "#a9b4c0",
      "#a8d84a",
    ],
  };
  const PART_HUES = { data: 7, transfer: 5, compute: 0, exchange: 1, sync: 4, other: 8 };
  const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]]; // of every further ten lines
  const XS = { step: "step", epoch: "epoch", elapsed_s: "time" };
  const X_NAMES = { step: "Step", epoch: "Epoch", elapsed_s: "Seconds" };
  const HEIGHT = 260,
    TALL = 460;
  const MOST_IN_TIP = 14;
  const FAR = 24; // pixels beyond the end of a line at which it still has a value under the cursor
  const MARKED = 60; // points of a line that are drawn
  const TIME_STEPS = [
    1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800,
    21600, 43200, 86400, 172800, 345600, 864000,
  ];

  // ---------------------------------------------------------------- data

  const numbers = (text) => {
    const bytes = Uint8Array.from(atob(text.slice(1)), (letter) => letter.charCodeAt(0));
    return new { u: Uint32Array, f: Float32Array, d: Float64Array }[text[0]](bytes.buffer);
  };

  /** Six significant digits, which a record has. */
  const tidy = (value) => Number(value.toPrecision(6));

  /** Values as the record has them: not 0.10000000149, the float32 next to 0.1. */
  const tidied = (values) => (values instanceof Float32Array ? Float64Array.from(values, tidy) : values);

  const unpack = (table) => ({
    x: Object.fromEntries(Object.entries(table.x).map(([name, text]) => [name, numbers(text)])),
    y: Object.fromEntries(
      Object.entries(table.y).map(([name, { at, v, mean }]) => [
        name,
        { at: at && numbers(at), v: tidied(numbers(v)), mean: mean && tidied(numbers(mean)) },
      ]),
    ),
  });

  for (const run of report.runs) for (const name in run.tables) run.tables[name] = unpack(run.tables[name]);

  /**
   * A series by ascending x, null where a line of the record has no value; empty if it is not there. In a long record
   * `y` has the extremes of stretches, and `mean` their means.
   */
  const seriesOf = (run, table, field, x, factor = 1) => {
    const xs = run.tables[table]?.x[x],
      own = run.tables[table]?.y[field];
    if (!xs || !own) return { x: [], y: [], mean: [] };
    const scaled = (value) => (Number.isNaN(value) ? null : tidy(factor * value));
    let points = [];
    own.v.forEach((value, i) => {
      const at = xs[own.at ? own.at[i] : i];
      if (!Number.isNaN(at)) points.push([at, scaled(value), scaled((own.mean ?? own.v)[i])]);
    });
    if (points.some(([at], i) => i && at < points[i - 1][0])) points.sort((a, b) => a[0] - b[0]);
    const [columnX, y, mean] = [0, 1, 2].map((i) => points.map((point) => point[i]));
    return { x: columnX, y, mean };
  };

  /** Moving average as TensorBoard has it, which is not drawn towards zero at its start. */
  const smoothed = (ys, weight) => {
    let sum = 0,
      total = 0;
    return ys.map((y) => {
      if (y === null) return null;
      sum = weight * sum + (1 - weight) * y;
      total = weight * total + 1 - weight;
      return sum / total;
    });
  };

  const valueAt = (series, x, field) => {
    let low = 0,
      high = series.x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (series.x[middle] <= x) low = middle;
      else high = middle;
    }
    const [a, b] = [series[field][low], series[field][high]],
      width = series.x[high] - series.x[low];
    if (series.x[low] === x || !width) return a;
    if (series.x[high] === x) return b;
    return a === null || b === null ? null : a + ((b - a) * (x - series.x[low])) / width;
  };

  /** Mean, least and most over the runs that reach an x, from where all have begun to where the last ends. */
  const overRuns = (all) => {
    const known = all.filter((series) => series.x.length);
    const begin = Math.max(...known.map((series) => series.x[0]));
    const xs = [...new Set(known.flatMap((series) => series.x))].filter((x) => x >= begin).sort((a, b) => a - b);
    const made = { x: [], y: [], low: [], high: [], runs: [], all: all.length };
    for (const x of xs) {
      const there = known.filter((series) => x <= series.x[series.x.length - 1]);
      const [values, means] = ["y", "mean"].map((field) => there.map((series) => valueAt(series, x, field)));
      const isKnown = [...values, ...means].every((value) => value !== null);
      made.x.push(x);
      made.runs.push(there.length);
      made.y.push(isKnown ? means.reduce((a, b) => a + b) / means.length : null);
      made.low.push(isKnown ? Math.min(...values) : null);
      made.high.push(isKnown ? Math.max(...values) : null);
    }
    made.mean = made.y;
    return made;
  };

  // ---------------------------------------------------------------- words

  const prefixed = (value, unit = "") => {
    const size = Math.abs(value);
    if (size >= 1e15 || (size && size < 1e-4 && unit !== "s"))
      return value.toExponential(3).replace(/\.?0+e/, "e") + (unit && ` ${unit}`);
    for (const [limit, letter] of [
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"],
    ])
      if (size >= limit) return `${tidy(value / limit)} ${letter}${unit}`;
    if (unit === "s" && size && size < 1) return size < 1e-3 ? `${tidy(value * 1e6)} µs` : `${tidy(value * 1e3)} ms`;
    return tidy(value) + (unit && ` ${unit}`);
  };

  const tick = (value, unit = "") => {
    const size = Math.abs(value),
      short = (v) => String(Number(v.toPrecision(4)));
    if (unit === "s" && size && size < 1) return size < 1e-3 ? `${short(value * 1e6)} µs` : `${short(value * 1e3)} ms`;
    const suffix = unit && (unit === "%" ? " %" : ` ${unit}`);
    if (size && (size < 1e-3 || size >= 1e15))
      return value.toExponential(1).replace(".0e", "e").replace("e+", "e") + suffix;
    for (const [limit, letter] of [
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"],
      [1e4, "k"],
    ])
      if (size >= limit) return short(value / (letter === "k" ? 1e3 : limit)) + letter + suffix;
    return short(value) + suffix;
  };

  const clock = (seconds) => {
    if (seconds < 60) return `${tidy(seconds)} s`;
    const h = Math.floor(seconds / 3600),
      m = Math.floor(seconds / 60) % 60,
      s = tidy(seconds % 60);
    return h ? `${h} h${m ? ` ${m} min` : ""}` : `${m} min${s ? ` ${Math.round(s)} s` : ""}`;
  };

  /** `15 s`, or `1:15` in minutes, or `2:30 h`, whichever fits the last one. */
  const clockTicks = (all) => {
    const last = all.at(-1) ?? 0,
      two = (value) => String(Math.floor(value)).padStart(2, "0");
    if (last < 120) return all.map((t) => `${tidy(t)} s`);
    if (last < 7200) return all.map((t) => `${Math.floor(t / 60)}:${two(t % 60)}`);
    return all.map((t) => `${Math.floor(t / 3600)}:${two((t % 3600) / 60)} h`);
  };

  const place = (x) => (state.x === "elapsed_s" ? clock(x) : `${XS[state.x]} ${tidy(x)}`);

  // ---------------------------------------------------------------- state and elements

  const has = (x) => report.runs.some((run) => Object.values(run.tables).some((table) => table.x[x]));
  const stored = (name, fallback) => {
    try {
      return localStorage.getItem(`jaxmpi-report-${name}`) ?? fallback;
    } catch {
      return fallback;
    }
  };
  const store = (name, value) => {
    try {
      localStorage.setItem(`jaxmpi-report-${name}`, value);
    } catch {
      /* a page of its own */
    }
  };

  const state = {
    x: Object.keys(XS).find(has) ?? "step",
    isMean: report.groups.length > 0,
    smoothing: 0,
    hidden: new Set(), // names of runs or groups
    run: 0, // of the figures of one run
    theme: stored("theme", "auto"),
  };

  const make = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties))
      if (name in made && !name.includes("-")) made[name] = value;
      else made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  const isDark = () =>
    state.theme === "dark" || (state.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  const hue = (i) => HUES[isDark() ? "dark" : "light"][i % 10];
  const faded = (colour, share) =>
    colour +
    Math.round(255 * share)
      .toString(16)
      .padStart(2, "0");
  const probe = document.body.appendChild(make("i", { hidden: true }));
  const themed = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };

  /** A run, or a group of runs with different seeds, that is one line in a chart. */
  const entities = () =>
    state.isMean
      ? report.groups.map((group, i) => ({
          name: group.runs.length > 1 ? `${group.name} (${group.runs.length} seeds)` : group.name,
          runs: group.runs,
          i,
        }))
      : report.runs.map((run, i) => ({ name: run.name, runs: [i], i }));

  const swatch = (colour, kind = "") => {
    const made = make("i", { className: `swatch ${kind}`, "aria-hidden": "true" });
    made.style.color = colour;
    return made;
  };

  const words = (text) => make("span", { className: "words" }, text);

  // ---------------------------------------------------------------- a card with a plot

  const cards = [];

  /** A card: head with its title and buttons, key, plot; `draw` is called when it is seen and when anything changes. */
  class Card {
    constructor(section, title, { isPlot = true, ofOneRun = false } = {}) {
      this.title = title;
      this.head = make("div", { className: "head" }, make("h3", {}, title));
      this.key = make("div", { className: "key" });
      this.plot = make("div", { className: "plot" });
      this.tip = make("div", { className: "tip", hidden: true, role: "status" });
      this.element = make(
        "article",
        { className: "card", "aria-label": title },
        this.head,
        this.key,
        this.plot,
        this.tip,
      );
      section.querySelector(".charts").append(this.element);
      section.classList.add("filled");
      this.isStale = true;
      if (ofOneRun && report.runs.length > 1) this.addPicker();
      if (isPlot) {
        this.peaks = this.button(
          "Peaks",
          () => {
            this.hasPeaks = !this.hasPeaks;
            this.refresh();
          },
          { "aria-label": `Peaks of ${title} within the axis` },
        );
        this.peaks.hidden = true;
        this.reset = this.button("Reset zoom", () => this.zoomOut());
        this.reset.hidden = true;
      }
      cards.push(this);
      seen.observe(this.element);
    }

    button(label, act, properties = {}) {
      const made = make("button", { type: "button", ...properties }, label);
      made.addEventListener("click", act);
      this.head.append(made);
      return made;
    }

    addPicker() {
      this.picker = make(
        "select",
        { "aria-label": `Run of ${this.title}` },
        ...report.runs.map((run, i) => make("option", { value: i }, run.name)),
      );
      this.picker.addEventListener("change", () => {
        state.run = Number(this.picker.value);
        redraw((card) => card.picker);
      });
      this.head.append(this.picker);
    }

    addLarge() {
      const large = this.button(
        "Large",
        () => {
          const isWide = this.element.classList.toggle("wide");
          large.setAttribute("aria-pressed", String(isWide));
          this.chart?.setSize(this.size());
        },
        { "aria-pressed": "false" },
      );
      large.classList.add("large");
    }

    size() {
      return {
        width: Math.max(this.plot.clientWidth, 120),
        height: this.element.classList.contains("wide") ? TALL : HEIGHT,
      };
    }

    refresh() {
      this.isStale = !this.isSeen;
      if (this.isStale) return;
      if (this.picker) this.picker.value = state.run;
      this.draw();
    }

    zoomOut() {
      this.chart.setData(this.chart.data, true);
      this.reset.hidden = true;
    }

    /** The upper end of the axis, below lone peaks unless they are asked for. */
    cut(high, values) {
      const cut = withoutPeaks(values);
      this.peaks.hidden &&= cut === null;
      this.peaks.setAttribute("aria-pressed", String(Boolean(this.hasPeaks)));
      return cut === null || this.hasPeaks ? high : Math.min(high, cut);
    }

    /** Put a uPlot chart in the place of the one before, zoomed as that was. */
    show(options, data, label) {
      const { min, max } = this.chart?.scales.x ?? {},
        isZoomed = this.chart && !this.reset.hidden && this.shownX === state.x;
      this.shownX = state.x;
      this.chart?.destroy();
      this.plot.textContent = "";
      this.tip.hidden = true;
      this.reset.hidden = this.peaks.hidden = true;
      this.plot.setAttribute("tabindex", "0");
      this.plot.setAttribute("role", "img");
      this.plot.setAttribute("aria-label", label);
      this.chart = new uPlot({ ...this.size(), legend: { show: false }, ...options }, data, this.plot);
      this.width = this.plot.clientWidth;
      if (isZoomed) this.chart.setScale("x", { min, max });
      this.chart.over.addEventListener("mouseleave", () => {
        this.tip.hidden = true;
      });
      this.chart.over.addEventListener("dblclick", () => this.zoomOut());
      this.plot.onkeydown = (event) => this.pressed(event);
      this.plot.onblur = () => {
        this.tip.hidden = true;
      };
    }

    /** Arrows move the cursor, + and - zoom, Escape shows all. */
    pressed(event) {
      if (!this.chart) return;
      const u = this.chart,
        xs = u.data[0],
        { min, max } = u.scales.x;
      const inside = [xs.findIndex((x) => x >= min), xs.findLastIndex((x) => x <= max)];
      const at = u.cursor.idx ?? inside[0],
        far = event.shiftKey ? Math.ceil(xs.length / 20) : 1;
      const to = { ArrowLeft: at - far, ArrowRight: at + far, Home: inside[0], End: inside[1] }[event.key];
      if (to !== undefined) {
        const x = xs[Math.min(Math.max(to, inside[0]), inside[1])];
        u.setCursor({ left: u.valToPos(x, "x"), top: u.over.clientHeight / 2 });
      } else if (event.key === "+" || event.key === "-") {
        const middle = at === null ? (min + max) / 2 : xs[at],
          half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
        u.setScale("x", { min: Math.max(middle - half, xs[0]), max: Math.min(middle + half, xs[xs.length - 1]) });
      } else if (event.key === "Escape") this.zoomOut();
      else return;
      event.preventDefault();
    }

    /** Show lines of text beside the cursor. */
    showTip(head, rows, left, top) {
      this.tip.replaceChildren(
        make("b", {}, head),
        ...rows.map((row) =>
          make(
            "div",
            { className: row.isNear ? "near" : "" },
            swatch(row.colour, row.kind),
            make("span", { className: "name" }, row.name),
            make("span", { className: "value" }, row.value),
            ...(row.extra ? [make("span", { className: "extra" }, row.extra)] : []),
          ),
        ),
      );
      this.tip.hidden = !rows.length;
      const card = this.element.getBoundingClientRect(),
        plot = (this.chart?.over ?? this.plot.firstChild).getBoundingClientRect();
      const x = plot.left - card.left + left,
        room = this.element.clientWidth - this.tip.offsetWidth - 4;
      const isLeft = x + 16 > room;
      this.tip.style.left = `${Math.max(4, Math.min(isLeft ? x - 16 - this.tip.offsetWidth : x + 16, room))}px`;
      this.tip.style.top = `${plot.top - card.top + Math.max(0, Math.min(top - 12, plot.height - this.tip.offsetHeight))}px`;
    }
  }

  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const card = cards.find((each) => each.element === entry.target);
        card.isSeen = entry.isIntersecting;
        if (card.isSeen && card.isStale) card.refresh();
      }
    },
    { rootMargin: "300px" },
  );

  const redraw = (which = () => true) => {
    for (const card of cards) if (which(card)) card.refresh();
  };

  const xAxis = () => ({
    stroke: themed("soft"),
    grid: { stroke: themed("grid"), width: 1 },
    ticks: { stroke: themed("line"), width: 1, size: 5 },
    font: "12px system-ui, sans-serif",
    size: 34,
    space: 56,
    ...(state.x === "elapsed_s"
      ? { incrs: TIME_STEPS, values: (u, splits) => clockTicks(splits) }
      : { values: (u, splits) => splits.map((x) => tick(x)) }),
    ...(state.x === "step"
      ? {
          incrs: [
            1,
            2,
            5,
            ...[1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((k) => [10 ** k, 2 * 10 ** k, 2.5 * 10 ** k, 5 * 10 ** k]),
          ],
        }
      : {}),
  });

  const yAxis = (unit, isLog = false) => ({
    stroke: themed("soft"),
    grid: { stroke: themed("grid"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
    size: (u, values) => 14 + 7 * Math.max(3, ...(values ?? []).map((text) => (text ?? "").length)),
    values: (u, splits) => (isLog ? logWords(u, splits, unit) : splits.map((y) => tick(y, unit))),
    space: 34,
    ...(isLog ? { splits: logSplits, filter: (u, splits) => splits } : {}),
  });

  /** Lines at 1, 2, ..., 9 of every power of ten; those with a number are as many as there is room for. */
  const logSplits = (u, axis, min, max) => {
    const made = [];
    for (let power = Math.floor(Math.log10(min)); power <= Math.log10(max); power++)
      for (let k = 1; k < 10; k++)
        if (k * 10 ** power >= min && k * 10 ** power <= max) made.push(Number((k * 10 ** power).toPrecision(1)));
    return made;
  };

  const logWords = (u, splits, unit) => {
    const { min, max } = u.scales.y,
      decades = Math.log10(max / min),
      room = (u.height - 40) / 22;
    const digits = decades > room / 2.5 ? "1" : decades > room / 6 ? "125" : decades > 0.6 ? "1235" : "123456789";
    const every = Math.ceil(decades / room);
    return splits.map((y) => {
      const [digit, power] = y.toExponential().split("e");
      return digits.includes(digit) && (digits !== "1" || Number(power) % every === 0) ? tick(y, unit) : null;
    });
  };

  const CURSOR = {
    y: false,
    drag: { x: true, y: true, uni: 30, setScale: true },
    sync: {
      key: "reports",
      setSeries: false,
      scales: ["x", null],
      filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
    },
  };

  /** Upper end of an axis that leaves lone peaks out; null if there are none. */
  const withoutPeaks = (values) => {
    const sorted = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
    const usual = sorted[Math.floor(sorted.length * 0.98)],
      most = sorted[sorted.length - 1];
    return sorted.length > 50 && usual > 0 && most > 3 * usual ? 1.3 * usual : null;
  };

  /** Note that the reader has zoomed in. */
  const noteZoom = (card) => (u, scale) => {
    const xs = u.data[0];
    if (scale === "x" && card.reset && xs.length)
      card.reset.hidden = u.scales.x.min <= xs[0] && u.scales.x.max >= xs[xs.length - 1];
  };

  // ---------------------------------------------------------------- curves of all runs

  class Curves extends Card {
    constructor(section, chart) {
      super(section, chart.title);
      this.description = chart;
      this.hiddenLabels = new Set();
      this.isLog = chart.isLog && this.spansDecade();
      this.log = this.button(
        "Log",
        () => {
          this.isLog = !this.isLog;
          this.refresh();
        },
        { "aria-label": `Logarithmic axis of ${chart.title}` },
      );
      this.addLarge();
      if (chart.note) this.note = words(chart.note);
    }

    spansDecade() {
      let [low, high] = [Infinity, 0];
      for (const run of report.runs)
        for (const { table, field } of this.description.series)
          for (const value of run.tables[table]?.y[field]?.v ?? [])
            if (!Number.isNaN(value)) {
              low = Math.min(low, value);
              high = Math.max(high, value);
            }
      return low > 0 && high >= 10 * low;
    }

    /** The series of a chart that has several, to hide and show. */
    drawKey() {
      const all = this.description.series.filter(
        (series) => series.label && report.runs.some((run) => run.tables[series.table]?.y[series.field]),
      );
      this.key.replaceChildren(
        ...(all.length < 2
          ? []
          : all.map((series) => {
              const entry = make(
                "button",
                { type: "button", "aria-pressed": String(!this.hiddenLabels.has(series.label)) },
                this.swatchOf(series),
                series.label,
              );
              entry.addEventListener("click", () => {
                if (!this.hiddenLabels.delete(series.label)) this.hiddenLabels.add(series.label);
                entry.setAttribute("aria-pressed", String(!this.hiddenLabels.has(series.label)));
                this.hide();
              });
              return entry;
            })),
        ...(this.note ? [this.note] : []),
      );
    }

    swatchOf(series) {
      return swatch("currentcolor", this.description.series.indexOf(series) ? "dashed" : "");
    }

    /** Lines with their data: of each run or group, each series of the chart. */
    lines() {
      const made = [];
      for (const entity of entities())
        for (const [place, series] of this.description.series.entries()) {
          const own = entity.runs.map((i) =>
            seriesOf(report.runs[i], series.table, series.field, state.x, series.factor),
          );
          const data = own.length > 1 ? overRuns(own) : own[0];
          if (!data.x.length) continue;
          const isEval = series.table === "evaluations";
          const dash = place ? [5, 4] : DASHES[Math.floor(entity.i / 10) % DASHES.length];
          const isSmooth = state.smoothing > 0 && series.table === "train";
          made.push({
            entity,
            series,
            data,
            colour: hue(entity.i),
            dash,
            isEval,
            name: series.label && this.description.series.length > 1 ? `${entity.name}, ${series.label}` : entity.name,
            smooth: isSmooth ? smoothed(data.mean, state.smoothing) : null,
          });
        }
      return made;
    }

    draw() {
      this.drawn = this.lines();
      this.drawKey();
      this.log.setAttribute("aria-pressed", String(this.isLog));
      if (!this.drawn.length) {
        this.chart?.destroy();
        this.chart = null;
        this.plot.replaceChildren(make("p", { className: "made" }, `No values by ${XS[state.x]}.`));
        return;
      }
      const fit = (ys) => (this.isLog ? ys.map((y) => (y > 0 ? y : null)) : ys);
      const tables = [],
        series = [{}],
        bands = [];
      this.columns = []; // of uPlot's series: [line, role]
      const add = (line, role, ys, options) => {
        tables.push([line.data.x, fit(ys)]);
        series.push({ label: line.name, scale: "y", points: { show: false }, ...options });
        this.columns.push([line, role]);
      };
      for (const line of this.drawn) {
        const width = report.runs.length > 20 ? 1.2 : 1.8,
          { colour, dash } = line;
        const isMarked = (line.isEval && line.data.x.length <= MARKED) || line.data.x.length < 3;
        const points = { show: isMarked, size: 5, fill: colour, stroke: colour };
        if (line.data.low) {
          add(line, "high", line.data.high, { stroke: null, width: 0 });
          add(line, "low", line.data.low, { stroke: null, width: 0 });
          bands.push({ series: [series.length - 2, series.length - 1], fill: faded(colour, 0.2) });
        }
        if (line.smooth) add(line, "smooth", line.smooth, { stroke: colour, width: width + 0.3 });
        add(line, "value", line.data.y, {
          stroke: line.smooth ? faded(colour, 0.3) : colour,
          width: line.smooth ? 1 : width,
          dash,
          points,
        });
      }
      const label = `${this.title} by ${XS[state.x]}. ${this.drawn
        .slice(0, 8)
        .map((line) => `${line.name}: last ${this.shown(line.data.y.findLast((y) => y !== null))}`)
        .join("; ")}`;
      this.show(
        {
          cursor: {
            ...CURSOR,
            points: { size: 7 },
            dataIdx: (u, i, at) => this.nearest(u, i, at),
          },
          scales: {
            x: {
              time: false,
              range: (u, min, max) => (max - min <= 1e-9 * Math.abs(max) ? [min - 0.5, max + 0.5] : [min, max]),
            },
            y: this.isLog
              ? { distr: 3, range: (u, min, max) => (min > 0 ? [min / 1.12, max * 1.12] : [0.1, 1]) }
              : { range: (u, min, max) => this.range(u, min, max) },
          },
          axes: [xAxis(), yAxis(this.description.unit, this.isLog)],
          series,
          bands,
          hooks: { setCursor: [(u) => this.moved(u)], setScale: [noteZoom(this)] },
        },
        uPlot.join(tables),
        label,
      );
      this.hide();
    }

    /** From zero if the least value is far below the greatest; lone peaks of speeds are left out. */
    range(u, min, max) {
      if (min === null) return [0, 1];
      const isFlat = max - min <= 1e-6 * Math.abs(max); // no ticks would differ
      const pad = isFlat ? Math.abs(max) * 0.1 || 1 : (max - min) * 0.06,
        [first, last] = u.series[0].idxs ?? [0, 0];
      const low = min >= 0 && (min < 0.4 * max || min < pad) ? 0 : min - pad;
      if (this.description.section !== "speed") return [low, max + pad];
      const shown = u.data
        .slice(1)
        .filter((_, i) => u.series[i + 1].show)
        .flatMap((ys) => Array.prototype.slice.call(ys, first, last + 1));
      return [low, this.cut(max + pad, shown)];
    }

    hide() {
      if (!this.chart) return;
      this.chart.batch(() =>
        this.columns.forEach(([line, role], i) => {
          const isShown = !state.hidden.has(line.entity.name) && !this.hiddenLabels.has(line.series.label);
          if (this.chart.series[i + 1].show !== isShown) this.chart.setSeries(i + 1, { show: isShown });
        }),
      );
    }

    shown(value) {
      return value === null || value === undefined ? "unknown" : prefixed(value, this.description.unit);
    }

    short(value) {
      return typeof value === "number" ? this.shown(Number(value.toPrecision(4))) : this.shown(value);
    }

    /** The line's own point that is nearest to the cursor; none far beyond its ends. */
    nearest(u, i, at) {
      if (!i) return at;
      const ys = u.data[i],
        known = (k) => ys[k] !== null && ys[k] !== undefined;
      let left = at,
        right = at;
      while (left >= 0 && !known(left)) left--;
      while (right < ys.length && !known(right)) right++;
      const [hasLeft, hasRight] = [left >= 0, right < ys.length];
      if (!hasLeft && !hasRight) return null;
      const apart = (k) => Math.abs(u.valToPos(u.data[0][k], "x") - u.cursor.left);
      const best = !hasRight || (hasLeft && apart(left) <= apart(right)) ? left : right;
      return (hasLeft && hasRight) || apart(best) <= FAR ? best : null;
    }

    moved(u) {
      const { left, top, idxs, idx } = u.cursor;
      const isMine = u.over.matches(":hover") || document.activeElement === this.plot;
      if (left === undefined || left < 0 || idx === null || idx === undefined || !isMine) {
        this.tip.hidden = true;
        return;
      }
      let rows = [];
      this.columns.forEach(([line, role], i) => {
        const k = idxs[i + 1];
        if (role !== "value" || !u.series[i + 1].show || k === null || k === undefined) return;
        const y = u.data[i + 1][k],
          x = u.data[0][k];
        const find = (other) => u.data[this.columns.findIndex(([l, r]) => l === line && r === other) + 1]?.[k];
        const runs = line.data.runs?.[line.data.x.indexOf(x)];
        const fewer = runs < line.data.all ? `, ${runs} of ${line.data.all} seeds` : "";
        const extra = line.data.low
          ? `(${this.short(find("low"))} to ${this.short(find("high"))}${fewer})`
          : line.smooth
            ? `(smooth ${this.short(find("smooth"))})`
            : "";
        rows.push({
          name: line.name,
          value: line.data.low ? this.short(y) : this.shown(y),
          extra,
          x,
          colour: line.colour,
          kind: line.dash.length ? "dashed" : "",
          away: Math.abs(u.valToPos(y, "y") - top),
        });
      });
      if (!rows.length) {
        this.tip.hidden = true;
        return;
      }
      const nearest = Math.min(...rows.map((row) => row.away));
      const head = u.data[0][idx];
      if (rows.length > MOST_IN_TIP) rows = rows.toSorted((a, b) => a.away - b.away).slice(0, MOST_IN_TIP);
      rows.forEach((row) => {
        row.isNear = row.away === nearest && rows.length > 1;
        if (row.x !== head) row.extra += ` at ${place(row.x)}`;
      });
      this.showTip(place(head), rows, left, top);
    }
  }

  // ---------------------------------------------------------------- parts of a step

  class Parts extends Card {
    constructor(section) {
      super(section, "Parts of a step", { ofOneRun: true });
      this.hiddenParts = new Set();
      this.isShare = false;
      this.share = this.button(
        "Share",
        () => {
          this.isShare = !this.isShare;
          this.refresh();
        },
        { "aria-label": "Parts as shares of a step" },
      );
      this.addLarge();
    }

    within(u) {
      const [first, last] = u.series[0].idxs ?? [0, 0];
      return [first, last + 1];
    }

    draw() {
      const run = report.runs[state.run],
        names = Object.keys(PART_HUES).filter((part) => run.tables.parts.y[part]);
      const nameOf = (part) => (run.estimated.includes(part) ? "~" : "") + part;
      this.share.setAttribute("aria-pressed", String(this.isShare));
      this.key.replaceChildren(
        ...names.map((part) => {
          const entry = make(
            "button",
            { type: "button", "aria-pressed": String(!this.hiddenParts.has(part)) },
            swatch(hue(PART_HUES[part]), "filled"),
            nameOf(part),
          );
          entry.addEventListener("click", () => {
            if (!this.hiddenParts.delete(part)) this.hiddenParts.add(part);
            this.draw();
          });
          return entry;
        }),
        ...(run.isLate ? [words("before it is known, an exchange is in compute")] : []),
      );
      const shown = names.filter((part) => !this.hiddenParts.has(part));
      const columns = shown.map((part) => seriesOf(run, "parts", part, state.x));
      if (!columns.length || !columns[0].x.length) {
        this.chart?.destroy();
        this.chart = null;
        this.plot.replaceChildren(make("p", { className: "made" }, "No parts of a step."));
        return;
      }
      const total = columns[0].x.map((_, k) => columns.reduce((sum, column) => sum + column.y[k], 0));
      const size = (value, k) => (this.isShare ? (100 * value) / (total[k] || 1) : value);
      const sums = columns.map((_, i) =>
        columns[0].x.map((_, k) =>
          size(
            columns.slice(0, i + 1).reduce((sum, column) => sum + column.y[k], 0),
            k,
          ),
        ),
      );
      const unit = this.isShare ? "%" : "s";
      this.show(
        {
          cursor: { ...CURSOR, points: { show: false } },
          scales: {
            x: { time: false },
            y: {
              range: (u, min, max) => [
                0,
                this.isShare ? 100 : this.cut((max || 1) * 1.04, total.slice(...this.within(u))),
              ],
            },
          },
          axes: [xAxis(), yAxis(unit)],
          series: [
            {},
            ...shown.map((part, i) => ({
              label: part,
              stroke: hue(PART_HUES[part]),
              width: 1,
              points: { show: false },
              ...(i ? {} : { fill: faded(hue(PART_HUES[part]), 0.55) }),
            })),
          ],
          bands: shown.slice(1).map((part, i) => ({ series: [i + 2, i + 1], fill: faded(hue(PART_HUES[part]), 0.55) })),
          hooks: {
            setScale: [noteZoom(this)],
            setCursor: [
              (u) => {
                const k = u.cursor.idx,
                  isMine = u.over.matches(":hover") || document.activeElement === this.plot;
                if (k === null || k === undefined || u.cursor.left < 0 || !isMine) {
                  this.tip.hidden = true;
                  return;
                }
                const rows = shown.map((part, i) => ({
                  name: nameOf(part),
                  colour: hue(PART_HUES[part]),
                  kind: "filled",
                  value: prefixed(columns[i].y[k], "s"),
                  extra: `${((100 * columns[i].y[k]) / (total[k] || 1)).toFixed(1)} %`,
                }));
                this.showTip(
                  `${place(u.data[0][k])}: ${prefixed(total[k], "s")}`,
                  rows.reverse(),
                  u.cursor.left,
                  u.cursor.top,
                );
              },
            ],
          },
        },
        [columns[0].x, ...sums],
        `Parts of a step of ${run.name}. Last: ${shown.map((part, i) => `${nameOf(part)} ${prefixed(columns[i].y.at(-1), "s")}`).join(", ")}`,
      );
    }
  }

  // ---------------------------------------------------------------- ranks

  class RankMap extends Card {
    constructor(section) {
      super(section, "A rank's own time, over the median of ranks", { isPlot: false, ofOneRun: true });
      this.canvas = make("canvas", { role: "img" });
      this.plot.append(this.canvas);
      this.canvas.addEventListener("mousemove", (event) => this.moved(event));
      this.canvas.addEventListener("mouseleave", () => {
        this.tip.hidden = true;
      });
    }

    draw() {
      const run = report.runs[state.run],
        map = run.map;
      this.element.hidden = !map;
      if (!map) return;
      const values = numbers(map.relative),
        columns = values.length / map.ranks,
        { width, height } = this.size();
      const left = 44,
        bottom = 26,
        inner = [width - left - 4, height - bottom],
        ratio = devicePixelRatio || 1;
      Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
      const pen = this.canvas.getContext("2d"),
        most = Math.max(1.1, ...values.filter((v) => v === v));
      pen.scale(ratio, ratio);
      const [slow, fast] = [themed("slow"), themed("fast")];
      const cell = [inner[0] / columns, inner[1] / map.ranks];
      pen.fillStyle = themed("grid");
      pen.fillRect(left, 0, ...inner);
      values.forEach((value, i) => {
        const row = Math.floor(i / columns),
          column = i % columns;
        if (!(value === value) || value === 1) return;
        pen.fillStyle = value > 1 ? slow : fast;
        pen.globalAlpha = Math.min(1, value > 1 ? (value - 1) / (Math.min(most, 2) - 1) : (1 - value) / 0.5);
        pen.fillRect(
          left + column * cell[0],
          row * cell[1],
          cell[0] + 0.5,
          Math.max(cell[1] - (cell[1] > 6 ? 1 : 0), 0.5),
        );
      });
      pen.globalAlpha = 1;
      pen.fillStyle = themed("soft");
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      const every = Math.ceil(map.ranks / Math.max(1, Math.floor(inner[1] / 18)));
      for (let row = 0; row < map.ranks; row += every) pen.fillText(row * map.each, left - 6, (row + 0.5) * cell[1]);
      pen.textBaseline = "alphabetic";
      pen.textAlign = "left";
      pen.fillText(`step ${tidy(map.ends[0])}`, left, height - 8);
      pen.textAlign = "right";
      pen.fillText(`step ${tidy(map.ends[1])}`, width - 4, height - 8);
      this.key.replaceChildren(
        swatch(fast, "filled"),
        words("faster"),
        swatch(slow, "filled"),
        make(
          "span",
          { className: "words" },
          `slower, up to ${most.toFixed(2)} times the median${map.each > 1 ? `; the slowest of every ${map.each} ranks` : ""}`,
        ),
      );
      this.canvas.setAttribute(
        "aria-label",
        `Map of ${map.ranks * map.each} ranks of ${run.name}; the slowest takes ${most.toFixed(2)} times the median`,
      );
      this.grid = { values, columns, left, cell, map };
    }

    moved(event) {
      const { values, columns, left, cell, map } = this.grid;
      const column = Math.floor((event.offsetX - left) / cell[0]),
        row = Math.floor(event.offsetY / cell[1]);
      const value = values[row * columns + column];
      if (column < 0 || column >= columns || row >= map.ranks || value === undefined) {
        this.tip.hidden = true;
        return;
      }
      const step = Math.round(map.ends[0] + ((map.ends[1] - map.ends[0]) * (column + 0.5)) / columns);
      const who =
        map.each > 1 ? `slowest of ranks ${row * map.each} to ${row * map.each + map.each - 1}` : `rank ${row}`;
      this.showTip(
        `about step ${step}`,
        [
          {
            name: who,
            value: value === value ? `${tidy(Number(value.toPrecision(3)))} × median` : "unknown",
            colour: themed(value > 1 ? "slow" : "fast"),
            kind: "filled",
          },
        ],
        event.offsetX,
        event.offsetY,
      );
    }
  }

  /** Named bars of a run. */
  class BarList extends Card {
    constructor(section, title, rowsOf, keyOf) {
      super(section, title, { isPlot: false, ofOneRun: true });
      this.element.classList.add("bars");
      this.rowsOf = rowsOf;
      this.keyOf = keyOf;
    }

    draw() {
      const run = report.runs[state.run],
        rows = this.rowsOf(run),
        most = Math.max(...rows.flatMap((row) => row.values), 1e-300);
      this.element.hidden = !rows.length;
      this.key.replaceChildren(...this.keyOf(run));
      this.plot.setAttribute("tabindex", "0"); // it scrolls
      this.plot.replaceChildren(
        ...rows.map((row) => {
          const bars = row.values.map((value) => {
            const bar = make("i");
            bar.style.width = `${(100 * value) / most}%`;
            return bar;
          });
          return make(
            "div",
            { className: "bar", title: row.name },
            make("span", { className: "name" }, row.name),
            make("span", { className: "track" }, ...bars),
            make("span", { className: "value" }, row.shown),
          );
        }),
      );
    }
  }

  /** Steps of asynchronous workers over time. */
  class WorkerSteps extends Curves {
    constructor(section) {
      const most = Math.max(...report.runs.map((run) => run.workerSteps.length));
      super(section, {
        title: "Steps by worker",
        unit: "",
        isLog: false,
        name: "steps",
        series: [...Array(Math.min(most, 64)).keys()].map((i) => ({
          table: "workers",
          field: `worker_steps.${i}`,
          label: `worker ${i}`,
          factor: 1,
        })),
      });
      if (report.runs.length > 1) this.addPicker();
    }

    swatchOf(series) {
      return swatch(hue(this.description.series.indexOf(series)));
    }

    lines() {
      const run = report.runs[state.run],
        entity = { name: run.name, i: 0 };
      return this.description.series
        .map((series, i) => ({
          entity: { ...entity, name: `\u0000${i}` },
          series,
          data: seriesOf(run, "workers", series.field, state.x),
          colour: hue(i),
          dash: DASHES[Math.floor(i / 10) % DASHES.length],
          isEval: false,
          name: series.label,
          smooth: null,
        }))
        .filter((line) => line.data.x.length);
    }
  }

  // ---------------------------------------------------------------- the toolbar

  const segments = (title, options, chosen, act) => {
    const buttons = Object.entries(options).map(([value, name]) => {
      const made = make("button", { type: "button", role: "radio", "aria-checked": String(value === chosen) }, name);
      made.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-checked", String(other === made)));
        act(value);
      });
      return made;
    });
    const group = make("div", { className: "segments", role: "radiogroup", "aria-label": title }, ...buttons);
    return make("div", { className: "choice" }, make("span", {}, title), group);
  };

  const legend = make("div", {
    className: "legend",
    role: "group",
    "aria-label": "Runs: click hides or shows, double click shows one alone",
  });

  const drawLegend = () => {
    const all = entities();
    legend.hidden = all.length < 2;
    legend.replaceChildren(
      ...all.map((entity) => {
        const isDashed = Math.floor(entity.i / 10) % DASHES.length > 0;
        const chip = make(
          "button",
          {
            type: "button",
            className: "run",
            title: `${entity.name}: click hides or shows it, double click shows it alone`,
            "aria-pressed": String(!state.hidden.has(entity.name)),
          },
          swatch(hue(entity.i), isDashed ? "dashed" : ""),
          make("span", {}, entity.name),
        );
        chip.addEventListener("click", (event) => {
          const isAlone = event.detail === 2;
          if (isAlone) state.hidden = new Set(all.map((each) => each.name).filter((name) => name !== entity.name));
          else if (!state.hidden.delete(entity.name)) state.hidden.add(entity.name);
          [...legend.querySelectorAll(".run")].forEach((each, i) =>
            each.setAttribute("aria-pressed", String(!state.hidden.has(all[i].name))),
          );
          for (const card of cards) if (card instanceof Curves) card.hide();
        });
        return chip;
      }),
    );
    if (all.length > 2) {
      const every = make("button", { type: "button", className: "all" }, "All");
      every.addEventListener("click", () => {
        state.hidden.clear();
        drawLegend();
        for (const card of cards) if (card instanceof Curves) card.hide();
      });
      legend.append(every);
    }
  };

  const applyTheme = () => {
    if (state.theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = state.theme;
    drawLegend();
    redraw();
  };

  const drawToolbar = () => {
    const bar = document.getElementById("toolbar");
    const xs = Object.fromEntries(Object.entries(X_NAMES).filter(([x]) => has(x)));
    bar.append(
      segments("x axis", xs, state.x, (x) => {
        state.x = x;
        redraw();
      }),
    );
    if (report.groups.length)
      bar.append(
        segments("Seeds", { mean: "Mean and band", each: "Every run" }, "mean", (value) => {
          state.isMean = value === "mean";
          state.hidden.clear();
          drawLegend();
          redraw();
        }),
      );
    const amount = make("input", {
      type: "range",
      min: 0,
      max: 0.99,
      step: 0.01,
      value: 0,
      "aria-label": "Smoothing of training curves",
    });
    const shown = make("output", {}, "0");
    amount.addEventListener("input", () => {
      state.smoothing = Number(amount.value);
      shown.textContent = amount.value;
      redraw((card) => card instanceof Curves);
    });
    if (report.runs.some((run) => run.tables.train?.y.loss))
      bar.append(make("label", { className: "choice" }, make("span", {}, "Smoothing"), amount, shown));
    bar.append(
      segments("Theme", { auto: "Auto", light: "Light", dark: "Dark" }, state.theme, (theme) => {
        state.theme = theme;
        store("theme", theme);
        applyTheme();
      }),
    );
    bar.append(legend);
    bar.hidden = false;
  };

  // ---------------------------------------------------------------- the page

  const sectionOf = (name) => document.getElementById(name);
  const some = (test) => report.runs.some(test);

  for (const section of Object.keys(report.sections)) {
    for (const chart of report.charts.filter((each) => each.section === section)) {
      new Curves(sectionOf(section), chart);
      const isFirst = chart === report.charts.find((each) => each.section === "speed");
      if (isFirst && some((run) => run.tables.parts.y.compute)) new Parts(sectionOf("speed"));
    }
    if (
      section === "speed" &&
      !report.charts.some((each) => each.section === "speed") &&
      some((run) => run.tables.parts.y.compute)
    )
      new Parts(sectionOf("speed"));
    if (section !== "ranks") continue;
    if (some((run) => run.slowest.ranks.length))
      new BarList(
        sectionOf("ranks"),
        "Ranks that others waited for",
        (run) => run.slowest.ranks.map(([name, times]) => ({ name, values: [times], shown: `${times} lines` })),
        (run) => [words(`the slowest rank, if 10 % above the median, in ${run.slowest.lines} lines`)],
      );
    if (some((run) => run.map)) new RankMap(sectionOf("ranks"));
    if (some((run) => run.buckets.length))
      new BarList(
        sectionOf("ranks"),
        "Exchange by bucket, on rank 0",
        (run) =>
          run.buckets.map(([name, busy, waited]) => ({
            name,
            values: [busy, waited],
            shown: prefixed(Math.max(busy, waited), "s"),
          })),
        () => [
          swatch("var(--accent)", "filled"),
          words("time a step in flight"),
          swatch("var(--slow)", "filled"),
          words("time that a rank waits for it"),
        ],
      );
    if (some((run) => run.workerSteps.length > 1)) new WorkerSteps(sectionOf("ranks"));
  }

  drawToolbar();
  applyTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
  let width = innerWidth;
  const resized = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const card = cards.find((each) => each.plot === entry.target);
      if (!card.isSeen || card.width === card.plot.clientWidth) continue;
      card.width = card.plot.clientWidth;
      if (card.chart) card.chart.setSize(card.size());
      else card.refresh();
    }
  });
  cards.forEach((card) => resized.observe(card.plot));
})();

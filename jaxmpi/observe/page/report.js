/* Draws the curves of a report from the JSON that stands in the page. No markup is made of its texts. */
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  root.classList.add("js");

  const HUES = {
    light: "#1d5fd1 #d9580d #0a8a5f #b3209e #cc2222 #0c7f99 #7040d8 #8a6100 #56616e #5a8208".split(" "),
    dark: "#6aa8ff #ff9a4d #3fd6a0 #ee86e0 #ff7b7b #3ccbe6 #b39bff #e6be3c #a9b4c0 #a8d84a".split(" "),
  };
  const PART_HUES = { data: 7, transfer: 5, compute: 0, exchange: 1, sync: 4, other: 8 };
  const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]]; // of every further ten lines
  const XS = { step: "step", epoch: "epoch", elapsed_s: "time" };
  const X_NAMES = { step: "Step", epoch: "Epoch", elapsed_s: "Seconds" };
  const [HEIGHT, TALL] = [260, 460];
  const FONT = "12px system-ui, sans-serif";
  const MOST_IN_TIP = 14;
  const FAR = 24; // pixels beyond the end of a line at which it still has a value under the cursor
  const MARKED = 60; // points of a line that are drawn
  const TIME_STEPS = [
    1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800,
    21600, 43200, 86400, 172800, 345600, 864000,
  ];

  // ---------------------------------------------------------------- data

  /** Six significant digits, as a record has them. */
  const tidy = (value) => Number(value.toPrecision(6));

  /**
   * A series by ascending x, null where a line of the record has no value; empty if there is none. In a long record `y`
   * has the extremes of stretches, and `mean` their means.
   */
  const sorted = (series, x, y = series?.y) => {
    const points = [];
    series?.x[x]?.forEach((at, i) => {
      if (at !== null) points.push([at, y[i], (series.mean ?? y)[i]]);
    });
    points.sort((a, b) => a[0] - b[0]);
    const [columnX, columnY, mean] = [0, 1, 2].map((i) => points.map((point) => point[i]));
    return { x: columnX, y: columnY, mean };
  };

  /** Moving average as TensorBoard has it, which is not drawn towards zero at its start. */
  const smoothed = (ys, weight) => {
    let [sum, total] = [0, 0];
    return ys.map((y) => {
      if (y === null) return null;
      sum = weight * sum + (1 - weight) * y;
      total = weight * total + 1 - weight;
      return sum / total;
    });
  };

  /** The value of a series at an x, between two points of it on the line through them. */
  const valueAt = (series, x, field) => {
    let [low, high] = [0, series.x.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (series.x[middle] <= x) low = middle;
      else high = middle;
    }
    const [a, b] = [series[field][low], series[field][high]];
    const width = series.x[high] - series.x[low];
    if (series.x[low] === x || !width) return a;
    if (series.x[high] === x) return b;
    return a === null || b === null ? null : a + ((b - a) * (x - series.x[low])) / width;
  };

  /** Mean, least and most over the runs that reach an x, from where all have begun to where the last ends. */
  const overRuns = (all) => {
    const known = all.filter((series) => series.x.length);
    const begin = Math.max(...known.map((series) => series.x[0]));
    const xs = [...new Set(known.flatMap((series) => series.x))].filter((x) => x >= begin).sort((a, b) => a - b);
    const rows = xs.map((x) => {
      const there = known.filter((series) => x <= series.x.at(-1));
      const [values, means] = ["y", "mean"].map((field) => there.map((series) => valueAt(series, x, field)));
      if ([...values, ...means].includes(null)) return [null, null, null, there.length];
      return [means.reduce((a, b) => a + b) / means.length, Math.min(...values), Math.max(...values), there.length];
    });
    const [y, low, high, runs] = [0, 1, 2, 3].map((i) => rows.map((row) => row[i]));
    return { x: xs, y, mean: y, low, high, runs, all: all.length };
  };

  // ---------------------------------------------------------------- words

  /** A value with a prefix and its unit; six digits as in the record, four on an axis. */
  const prefixed = (value, unit = "", digits = 6) => {
    const size = Math.abs(value);
    const short = (v) => Number(v.toPrecision(digits));
    if (unit === "s" && size && size < 1) return size < 1e-3 ? `${short(value * 1e6)} µs` : `${short(value * 1e3)} ms`;
    if (size >= 1e15 || (size && size < 1e-4))
      return value.toExponential(digits / 2).replace(/\.?0+e/, "e").replace("e+", "e") + (unit && ` ${unit}`);
    const [letter, factor] = Object.entries({ T: 1e12, G: 1e9, M: 1e6 }).find((each) => size >= each[1]) ?? ["", 1];
    return `${short(value / factor)} ${letter}${unit}`.trim();
  };

  const tick = (value, unit) => prefixed(value, unit, 4);

  const clock = (seconds) => {
    if (seconds < 60) return `${tidy(seconds)} s`;
    const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, tidy(seconds % 60)];
    return h ? `${h} h${m ? ` ${m} min` : ""}` : `${m} min${s ? ` ${Math.round(s)} s` : ""}`;
  };

  /** `15 s`, or `1:15` in minutes, or `2:30 h`, whichever fits the last one. */
  const clockTicks = (all) => {
    const last = all.at(-1) ?? 0;
    const two = (value) => String(Math.floor(value)).padStart(2, "0");
    if (last < 120) return all.map((t) => `${tidy(t)} s`);
    if (last < 7200) return all.map((t) => `${Math.floor(t / 60)}:${two(t % 60)}`);
    return all.map((t) => `${Math.floor(t / 3600)}:${two((t % 3600) / 60)} h`);
  };

  const place = (x) => (state.x === "elapsed_s" ? clock(x) : `${XS[state.x]} ${tidy(x)}`);

  // ---------------------------------------------------------------- state and elements

  const some = (test) => report.runs.some(test);
  const has = (x) => some((run) => [...run.charts.flat(), run.parts].some((series) => series?.x[x]));

  const state = {
    x: Object.keys(XS).find(has) ?? "step",
    isMean: report.groups.length > 0,
    smoothing: 0,
    hidden: new Set(), // names of runs or groups
    run: 0, // of the figures of one run
    theme: "auto",
  };

  const make = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties))
      if (name in made && !name.includes("-")) made[name] = value;
      else made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  const button = (act, properties, ...children) => {
    const made = make("button", { type: "button", ...properties }, ...children);
    made.addEventListener("click", act);
    return made;
  };

  const press = (element, isPressed) => element.setAttribute("aria-pressed", String(Boolean(isPressed)));

  /** A button that is on or off. */
  const toggle = (isOn, act, properties, ...children) => {
    const flip = () => {
      const isPressed = made.getAttribute("aria-pressed") !== "true";
      press(made, isPressed);
      act(isPressed);
    };
    const made = button(flip, { "aria-pressed": String(Boolean(isOn)), ...properties }, ...children);
    return made;
  };

  /** A button that hides or shows what has this name. */
  const hider = (hidden, name, act, ...children) =>
    toggle(!hidden.has(name), (isShown) => act(isShown ? hidden.delete(name) : hidden.add(name)), {}, ...children);

  const isDark = () =>
    state.theme === "dark" || (state.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  const hue = (i) => HUES[isDark() ? "dark" : "light"][i % 10];
  const dashOf = (i) => DASHES[Math.floor(i / 10) % DASHES.length];
  const faded = (colour, share) => colour + Math.round(255 * share).toString(16).padStart(2, "0");
  const probe = document.body.appendChild(make("i", { hidden: true }));
  const themed = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };

  /** A run, or a group of runs with different seeds, that is one line in a chart. */
  const entities = () =>
    (state.isMean ? report.groups : report.runs).map(({ name, runs = [] }, i) => ({
      name: runs.length > 1 ? `${name} (${runs.length} seeds)` : name,
      runs: state.isMean ? runs : [i],
      i,
    }));

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
    constructor(section, title, { isPlot = true, isOfOneRun = false } = {}) {
      this.title = title;
      this.head = make("div", { className: "head" }, make("h3", {}, title));
      this.key = make("div", { className: "key" });
      this.plot = make("div", { className: "plot" });
      this.tip = make("div", { className: "tip", hidden: true, role: "status" });
      const inside = [this.head, this.key, this.plot, this.tip];
      this.element = make("article", { className: "card", "aria-label": title }, ...inside);
      section.querySelector(".charts").append(this.element);
      section.classList.add("filled");
      this.isStale = true;
      if (isOfOneRun && report.runs.length > 1) this.addPicker();
      if (isPlot) {
        this.peaks = this.addSwitch("Peaks", "hasPeaks", `Peaks of ${title} within the axis`);
        this.reset = button(() => this.zoomOut(), {}, "Reset zoom");
        this.head.append(this.reset);
        this.peaks.hidden = this.reset.hidden = true;
      }
      cards.push(this);
      seen.observe(this.element);
    }

    /** A button that turns a field of the card on or off. */
    addSwitch(label, field, description) {
      const set = (isOn) => {
        this[field] = isOn;
        this.refresh();
      };
      const made = toggle(this[field], set, { "aria-label": description }, label);
      this.head.append(made);
      return made;
    }

    addPicker() {
      const options = report.runs.map((run, i) => make("option", { value: i }, run.name));
      this.picker = make("select", { "aria-label": `Run of ${this.title}` }, ...options);
      this.picker.addEventListener("change", () => {
        state.run = Number(this.picker.value);
        redraw((card) => card.picker);
      });
      this.head.append(this.picker);
    }

    addLarge() {
      const resize = (isLarge) => {
        this.element.classList.toggle("wide", isLarge);
        this.chart?.setSize(this.size());
      };
      this.head.append(toggle(false, resize, { className: "large" }, "Large"));
    }

    size() {
      const isWide = this.element.classList.contains("wide");
      return { width: Math.max(this.plot.clientWidth, 120), height: isWide ? TALL : HEIGHT };
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
      const sorted = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
      const usual = sorted[Math.floor(sorted.length * 0.98)];
      const hasLone = sorted.length > 50 && usual > 0 && sorted.at(-1) > 3 * usual;
      this.peaks.hidden &&= !hasLone;
      return hasLone && !this.hasPeaks ? Math.min(high, 1.3 * usual) : high;
    }

    /** Nothing to draw but a sentence. */
    clear(text) {
      this.chart?.destroy();
      this.chart = null;
      this.plot.replaceChildren(make("p", { className: "made" }, text));
    }

    /** Put a uPlot chart in the place of the one before, zoomed as that was. */
    show({ axes, series, bands, cursor, scales }, data, label) {
      const { min, max } = this.chart?.scales.x ?? {};
      const isZoomed = this.chart && !this.reset.hidden && this.shownX === state.x;
      this.shownX = state.x;
      this.chart?.destroy();
      this.plot.textContent = "";
      this.tip.hidden = this.reset.hidden = this.peaks.hidden = true;
      for (const [name, value] of Object.entries({ tabindex: "0", role: "img", "aria-label": label }))
        this.plot.setAttribute(name, value);
      const noteZoom = (u, scale) => {
        const xs = u.data[0];
        if (scale === "x" && xs.length)
          this.reset.hidden = u.scales.x.min <= xs[0] && u.scales.x.max >= xs[xs.length - 1];
      };
      const hooks = { setScale: [noteZoom], setCursor: [(u) => this.moved(u)] };
      const options = { ...this.size(), legend: { show: false }, axes, series, bands, scales, hooks };
      this.chart = new uPlot({ ...options, cursor: { ...CURSOR, ...cursor } }, data, this.plot);
      this.width = this.plot.clientWidth;
      if (isZoomed) this.chart.setScale("x", { min, max });
      this.plot.onblur = () => (this.tip.hidden = true);
      this.chart.over.addEventListener("mouseleave", this.plot.onblur);
      this.chart.over.addEventListener("dblclick", () => this.zoomOut());
      this.plot.onkeydown = (event) => this.pressed(event);
    }

    /** Arrows move the cursor, + and - zoom, Escape shows all. */
    pressed(event) {
      if (!this.chart) return;
      const u = this.chart;
      const xs = u.data[0];
      const { min, max } = u.scales.x;
      const inside = [xs.findIndex((x) => x >= min), xs.findLastIndex((x) => x <= max)];
      const at = u.cursor.idx ?? inside[0];
      const far = event.shiftKey ? Math.ceil(xs.length / 20) : 1;
      const to = { ArrowLeft: at - far, ArrowRight: at + far, Home: inside[0], End: inside[1] }[event.key];
      if (to !== undefined) {
        const x = xs[Math.min(Math.max(to, inside[0]), inside[1])];
        u.setCursor({ left: u.valToPos(x, "x"), top: u.over.clientHeight / 2 });
      } else if (event.key === "+" || event.key === "-") {
        const middle = at === null ? (min + max) / 2 : xs[at];
        const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
        u.setScale("x", { min: Math.max(middle - half, xs[0]), max: Math.min(middle + half, xs[xs.length - 1]) });
      } else if (event.key === "Escape") this.zoomOut();
      else return;
      event.preventDefault();
    }

    /** Values under the cursor, if this is the chart that the reader points to. */
    moved(u) {
      const { left, top, idx } = u.cursor;
      const isMine = u.over.matches(":hover") || document.activeElement === this.plot;
      const isThere = isMine && left >= 0 && idx !== null && idx !== undefined;
      const { head, rows } = isThere ? this.valuesAt(u, idx) : { rows: [] };
      this.showTip(head, rows, left, top);
    }

    /** Show lines of text beside the cursor; none without lines. */
    showTip(head, rows, left, top) {
      this.tip.hidden = !rows.length;
      if (!rows.length) return;
      const line = (row) =>
        make(
          "div",
          { className: row.isNear ? "near" : "" },
          swatch(row.colour, row.kind),
          make("span", { className: "name" }, row.name),
          make("span", { className: "value" }, row.value),
          ...(row.extra ? [make("span", { className: "extra" }, row.extra)] : []),
        );
      this.tip.replaceChildren(make("b", {}, head), ...rows.map(line));
      const card = this.element.getBoundingClientRect();
      const plot = (this.chart?.over ?? this.plot.firstChild).getBoundingClientRect();
      const { offsetWidth: width, offsetHeight: height } = this.tip;
      const x = plot.left - card.left + left;
      const room = this.element.clientWidth - width - 4;
      const beside = x + 16 > room ? x - 16 - width : x + 16;
      this.tip.style.left = `${Math.max(4, Math.min(beside, room))}px`;
      this.tip.style.top = `${plot.top - card.top + Math.max(0, Math.min(top - 12, plot.height - height))}px`;
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

  const redraw = (which = () => true) => cards.filter(which).forEach((card) => card.refresh());

  const axis = () => ({ stroke: themed("soft"), grid: { stroke: themed("grid"), width: 1 }, font: FONT });

  const xAxis = () => {
    const powers = [1, 2, 3, 4, 5, 6, 7, 8, 9].map((k) => 10 ** k);
    const wholeSteps = [1, 2, 5, ...powers.flatMap((power) => [1, 2, 2.5, 5].map((k) => k * power))];
    const incrs = { elapsed_s: TIME_STEPS, step: wholeSteps }[state.x];
    return {
      ...axis(),
      ticks: { stroke: themed("line"), width: 1, size: 5 },
      size: 34,
      space: 56,
      values: (u, splits) => (state.x === "elapsed_s" ? clockTicks(splits) : splits.map((x) => tick(x))),
      ...(incrs ? { incrs } : {}),
    };
  };

  const yAxis = (unit, isLog = false) => ({
    ...axis(),
    ticks: { show: false },
    size: (u, values) => 14 + 7 * Math.max(3, ...(values ?? []).map((text) => (text ?? "").length)),
    values: (u, splits) => (isLog ? logWords(u, splits, unit) : splits.map((y) => tick(y, unit))),
    space: 34,
    ...(isLog ? { splits: logSplits, filter: (u, splits) => splits } : {}),
  });

  /** Lines at 1, 2, ..., 9 of every power of ten; uPlot's own words are of the powers and the ends alone. */
  const logSplits = (u, axis, min, max) => {
    const powers = [...Array(Math.floor(Math.log10(max / min)) + 3).keys()].map((i) => Math.floor(Math.log10(min)) + i);
    const made = powers.flatMap((power) => [1, 2, 3, 4, 5, 6, 7, 8, 9].map((k) => Number(`${k}e${power}`)));
    return made.filter((y) => y >= min && y <= max);
  };

  /** The numbers at these lines, as many as there is room for. */
  const logWords = (u, splits, unit) => {
    const { min, max } = u.scales.y;
    const decades = Math.log10(max / min);
    const room = (u.height - 40) / 22;
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

  // ---------------------------------------------------------------- curves of all runs

  class Curves extends Card {
    constructor(section, chart) {
      super(section, chart.title);
      this.description = chart;
      this.number = report.charts.indexOf(chart);
      this.hiddenLabels = new Set();
      this.isLog = chart.isLog && this.spansDecade();
      this.addSwitch("Log", "isLog", `Logarithmic axis of ${chart.title}`);
      this.addLarge();
    }

    spansDecade() {
      let [low, high] = [Infinity, 0];
      for (const run of report.runs)
        for (const value of run.charts[this.number].flatMap((series) => series?.y ?? []))
          if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
      return low > 0 && high >= 10 * low;
    }

    /** The series of a chart that has several, to hide and show. */
    drawKey() {
      const all = this.description.series.filter(({ label }, i) => label && some((run) => this.dataOf(run, i)));
      const entries = all.map((series) =>
        hider(this.hiddenLabels, series.label, () => this.hide(), this.swatchOf(series), series.label),
      );
      const { note } = this.description;
      this.key.replaceChildren(...(all.length > 1 ? entries : []), ...(note ? [words(note)] : []));
    }

    dataOf(run, i) {
      return run.charts[this.number][i];
    }

    swatchOf(series) {
      return swatch("currentcolor", this.description.series.indexOf(series) ? "dashed" : "");
    }

    /** Lines with their data: of each run or group, each series of the chart. */
    lines() {
      const made = [];
      for (const entity of entities())
        for (const [i, series] of this.description.series.entries()) {
          const { table, label } = series;
          const runs = entity.runs.map((k) => sorted(this.dataOf(report.runs[k], i), state.x));
          const data = runs.length > 1 ? overRuns(runs) : runs[0];
          made.push({
            entity,
            series,
            data,
            colour: hue(entity.i),
            dash: i ? [5, 4] : dashOf(entity.i),
            name: label && this.description.series.length > 1 ? `${entity.name}, ${label}` : entity.name,
            smooth: state.smoothing > 0 && table === "train" ? smoothed(data.mean, state.smoothing) : null,
          });
        }
      return made;
    }

    draw() {
      const drawn = this.lines().filter((line) => line.data.x.length);
      this.drawKey();
      if (!drawn.length) return this.clear(`No values by ${XS[state.x]}.`);
      const [tables, series, bands] = [[], [{}], []];
      this.columns = []; // of uPlot's series: [line, role]
      const add = (line, role, ys, options) => {
        tables.push([line.data.x, this.isLog ? ys.map((y) => (y > 0 ? y : null)) : ys]);
        series.push({ label: line.name, scale: "y", points: { show: false }, ...options });
        this.columns.push([line, role]);
      };
      const width = report.runs.length > 20 ? 1.2 : 1.8;
      for (const line of drawn) {
        const { colour, dash, data, smooth } = line;
        const isEval = line.series.table === "evaluations";
        const isMarked = (isEval && data.x.length <= MARKED) || data.x.length < 3;
        const points = { show: isMarked, size: 5, fill: colour, stroke: colour };
        if (data.low) {
          add(line, "high", data.high, { stroke: null, width: 0 });
          add(line, "low", data.low, { stroke: null, width: 0 });
          bands.push({ series: [series.length - 2, series.length - 1], fill: faded(colour, 0.2) });
        }
        if (smooth) add(line, "smooth", smooth, { stroke: colour, width: width + 0.3 });
        const look = smooth ? { stroke: faded(colour, 0.3), width: 1 } : { stroke: colour, width };
        add(line, "value", data.y, { ...look, dash, points });
      }
      const last = ({ name, data }) => `${name}: last ${this.shown(data.y.findLast((y) => y !== null))}`;
      const wide = (u, min, max) => (max - min <= 1e-9 * Math.abs(max) ? [min - 0.5, max + 0.5] : [min, max]);
      const y = this.isLog
        ? { distr: 3, range: (u, min, max) => (min > 0 ? [min / 1.12, max * 1.12] : [0.1, 1]) }
        : { range: (u, min, max) => this.range(u, min, max) };
      this.show(
        {
          cursor: { points: { size: 7 }, dataIdx: (u, i, at) => this.nearest(u, i, at) },
          scales: { x: { time: false, range: wide }, y },
          axes: [xAxis(), yAxis(this.description.unit, this.isLog)],
          series,
          bands,
        },
        uPlot.join(tables),
        `${this.title} by ${XS[state.x]}. ${drawn.slice(0, 8).map(last).join("; ")}`,
      );
      this.hide();
    }

    /** From zero if the least value is far below the greatest; lone peaks of speeds are left out. */
    range(u, min, max) {
      if (min === null) return [0, 1];
      const isFlat = max - min <= 1e-6 * Math.abs(max); // no ticks would differ
      const pad = isFlat ? Math.abs(max) * 0.1 || 1 : (max - min) * 0.06;
      const low = min >= 0 && (min < 0.4 * max || min < pad) ? 0 : min - pad;
      if (this.description.section !== "speed") return [low, max + pad];
      const [first, last] = u.series[0].idxs ?? [0, 0];
      const shown = u.data.slice(1).filter((_, i) => u.series[i + 1].show);
      return [low, this.cut(max + pad, shown.flatMap((ys) => ys.slice(first, last + 1)))];
    }

    hide() {
      this.chart?.batch(() =>
        this.columns.forEach(([line], i) => {
          const show = !state.hidden.has(line.entity.name) && !this.hiddenLabels.has(line.series.label);
          if (this.chart.series[i + 1].show !== show) this.chart.setSeries(i + 1, { show });
        }),
      );
    }

    shown(value, digits = 6) {
      return typeof value === "number" ? prefixed(value, this.description.unit, digits) : "unknown";
    }

    /** The line's own point that is nearest to the cursor; none far beyond its ends. */
    nearest(u, i, at) {
      if (!i) return at;
      const ys = u.data[i];
      const isKnown = (k) => ys[k] !== null && ys[k] !== undefined;
      let [left, right] = [at, at];
      while (left >= 0 && !isKnown(left)) left--;
      while (right < ys.length && !isKnown(right)) right++;
      const [hasLeft, hasRight] = [left >= 0, right < ys.length];
      if (!hasLeft && !hasRight) return null;
      const apart = (k) => Math.abs(u.valToPos(u.data[0][k], "x") - u.cursor.left);
      const best = !hasRight || (hasLeft && apart(left) <= apart(right)) ? left : right;
      return (hasLeft && hasRight) || apart(best) <= FAR ? best : null;
    }

    valuesAt(u, idx) {
      const head = u.data[0][idx];
      let rows = [];
      this.columns.forEach(([line, role], i) => {
        const k = u.cursor.idxs[i + 1];
        if (role !== "value" || !u.series[i + 1].show || k === null || k === undefined) return;
        const [x, y] = [u.data[0][k], u.data[i + 1][k]];
        const find = (other) => {
          const column = this.columns.findIndex(([l, r]) => l === line && r === other) + 1;
          return this.shown(u.data[column]?.[k], 4);
        };
        const runs = line.data.runs?.[line.data.x.indexOf(x)];
        const fewer = runs < line.data.all ? `, ${runs} of ${line.data.all} seeds` : "";
        let extra = line.smooth ? `(smooth ${find("smooth")})` : "";
        if (line.data.low) extra = `(${find("low")} to ${find("high")}${fewer})`;
        if (x !== head) extra += ` at ${place(x)}`;
        rows.push({
          name: line.name,
          value: this.shown(y, line.data.low ? 4 : 6),
          extra,
          colour: line.colour,
          kind: line.dash.length ? "dashed" : "",
          away: Math.abs(u.valToPos(y, "y") - u.cursor.top),
        });
      });
      const nearest = Math.min(...rows.map((row) => row.away));
      if (rows.length > MOST_IN_TIP) rows = rows.toSorted((a, b) => a.away - b.away).slice(0, MOST_IN_TIP);
      for (const row of rows) row.isNear = row.away === nearest && rows.length > 1;
      return { head: place(head), rows };
    }
  }

  // ---------------------------------------------------------------- parts of a step

  class Parts extends Card {
    constructor(section) {
      super(section, "Parts of a step", { isOfOneRun: true });
      this.hiddenParts = new Set();
      this.addSwitch("Share", "isShare", "Parts as shares of a step");
      this.addLarge();
    }

    draw() {
      const run = report.runs[state.run];
      const names = Object.keys(PART_HUES).filter((part) => run.parts?.y[part]);
      const entries = names.map((part) =>
        hider(this.hiddenParts, part, () => this.draw(), swatch(hue(PART_HUES[part]), "filled"), part),
      );
      const note = run.isLate ? [words("before it is known, an exchange is in compute")] : [];
      this.key.replaceChildren(...entries, ...note);
      const shown = names.filter((part) => !this.hiddenParts.has(part));
      this.columns = shown.map((part) => ({
        ...sorted(run.parts, state.x, run.parts.y[part]),
        title: part,
        colour: hue(PART_HUES[part]),
      }));
      if (!this.columns.length || !this.columns[0].x.length) return this.clear("No parts of a step.");
      const xs = this.columns[0].x;
      const stacked = (count) => xs.map((_, k) => this.columns.slice(0, count).reduce((sum, { y }) => sum + y[k], 0));
      this.total = stacked(shown.length);
      const sums = this.columns.map((_, i) =>
        stacked(i + 1).map((sum, k) => (this.isShare ? (100 * sum) / (this.total[k] || 1) : sum)),
      );
      const fills = this.columns.map(({ colour }) => ({ fill: faded(colour, 0.55) }));
      const high = (u, max) => {
        const [first, last] = u.series[0].idxs ?? [0, 0];
        return this.isShare ? 100 : this.cut((max || 1) * 1.04, this.total.slice(first, last + 1));
      };
      const last = ({ title, y }) => `${title} ${prefixed(y.at(-1), "s")}`;
      const line = { width: 1, points: { show: false } };
      this.show(
        {
          cursor: { points: { show: false } },
          scales: { x: { time: false }, y: { range: (u, min, max) => [0, high(u, max)] } },
          axes: [xAxis(), yAxis(this.isShare ? "%" : "s")],
          series: [{}, ...this.columns.map(({ colour }, i) => ({ ...line, stroke: colour, ...(i ? {} : fills[0]) }))],
          bands: fills.slice(1).map((fill, i) => ({ series: [i + 2, i + 1], ...fill })),
        },
        [xs, ...sums],
        `Parts of a step of ${run.name}. Last: ${this.columns.map(last).join(", ")}`,
      );
    }

    valuesAt(u, k) {
      const rows = this.columns.map(({ title, colour, y }) => ({
        name: title,
        colour,
        kind: "filled",
        value: prefixed(y[k], "s"),
        extra: `${((100 * y[k]) / (this.total[k] || 1)).toFixed(1)} %`,
      }));
      return { head: `${place(u.data[0][k])}: ${prefixed(this.total[k], "s")}`, rows: rows.reverse() };
    }
  }

  // ---------------------------------------------------------------- ranks

  class RankMap extends Card {
    constructor(section) {
      super(section, "A rank's own time, over the median of ranks", { isPlot: false, isOfOneRun: true });
      this.canvas = make("canvas", { role: "img" });
      this.plot.append(this.canvas);
      this.canvas.addEventListener("mousemove", (event) => this.pointed(event));
      this.canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
    }

    draw() {
      const { map, name } = report.runs[state.run];
      this.element.hidden = !map;
      if (!map) return;
      const values = map.relative;
      const columns = values.length / map.ranks;
      const { width, height } = this.size();
      const [left, bottom, ratio] = [44, 26, devicePixelRatio || 1];
      const inner = [width - left - 4, height - bottom];
      Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
      const pen = this.canvas.getContext("2d");
      const most = Math.max(1.1, ...values);
      const [slow, fast] = [themed("slow"), themed("fast")];
      const cell = [inner[0] / columns, inner[1] / map.ranks];
      const gap = cell[1] > 6 ? 1 : 0;
      pen.scale(ratio, ratio);
      pen.fillStyle = themed("grid");
      pen.fillRect(left, 0, ...inner);
      values.forEach((value, i) => {
        if (value === null || value === 1) return;
        pen.fillStyle = value > 1 ? slow : fast;
        pen.globalAlpha = Math.min(1, value > 1 ? (value - 1) / (Math.min(most, 2) - 1) : (1 - value) / 0.5);
        const corner = [left + (i % columns) * cell[0], Math.floor(i / columns) * cell[1]];
        pen.fillRect(...corner, cell[0] + 0.5, Math.max(cell[1] - gap, 0.5));
      });
      const write = (text, align, x, y) => {
        pen.textAlign = align;
        pen.fillText(text, x, y);
      };
      Object.assign(pen, { globalAlpha: 1, fillStyle: themed("soft"), font: FONT, textBaseline: "middle" });
      const every = Math.ceil(map.ranks / Math.max(1, Math.floor(inner[1] / 18)));
      for (let row = 0; row < map.ranks; row += every) write(row * map.each, "right", left - 6, (row + 0.5) * cell[1]);
      write(`step ${tidy(map.ends[0])}`, "left", left, height - 12);
      write(`step ${tidy(map.ends[1])}`, "right", width - 4, height - 12);
      const group = map.each > 1 ? `; the slowest of every ${map.each} ranks` : "";
      const slower = words(`slower, up to ${most.toFixed(2)} times the median${group}`);
      this.key.replaceChildren(swatch(fast, "filled"), words("faster"), swatch(slow, "filled"), slower);
      const times = `the slowest takes ${most.toFixed(2)} times the median`;
      this.canvas.setAttribute("aria-label", `Map of ${map.ranks * map.each} ranks of ${name}; ${times}`);
      this.grid = { values, columns, left, cell, map };
    }

    pointed({ offsetX, offsetY }) {
      const { values, columns, left, cell, map } = this.grid;
      const [column, row] = [Math.floor((offsetX - left) / cell[0]), Math.floor(offsetY / cell[1])];
      if (column < 0 || column >= columns || row >= map.ranks) return this.showTip("", []);
      const value = values[row * columns + column];
      const step = Math.round(map.ends[0] + ((map.ends[1] - map.ends[0]) * (column + 0.5)) / columns);
      const ranks = `slowest of ranks ${row * map.each} to ${row * map.each + map.each - 1}`;
      const line = {
        name: map.each > 1 ? ranks : `rank ${row}`,
        value: value === null ? "unknown" : `${Number(value.toPrecision(3))} × median`,
        colour: themed(value > 1 ? "slow" : "fast"),
        kind: "filled",
      };
      this.showTip(`about step ${step}`, [line], offsetX, offsetY);
    }
  }

  /** Named bars of a run. */
  class BarList extends Card {
    constructor(section, title, rowsOf, keyOf) {
      super(section, title, { isPlot: false, isOfOneRun: true });
      this.element.classList.add("bars");
      this.plot.setAttribute("tabindex", "0"); // it scrolls
      Object.assign(this, { rowsOf, keyOf });
    }

    draw() {
      const run = report.runs[state.run];
      const rows = this.rowsOf(run);
      const most = Math.max(...rows.flatMap((row) => row.values), 1e-300);
      const drawn = rows.map(({ name, values, shown }) => {
        const bars = values.map(() => make("i"));
        bars.forEach((bar, i) => (bar.style.width = `${(100 * values[i]) / most}%`));
        const columns = { name: [name], track: bars, value: [shown] };
        const cells = Object.entries(columns).map(([className, inside]) => make("span", { className }, ...inside));
        return make("div", { className: "bar", title: name }, ...cells);
      });
      this.element.hidden = !rows.length;
      this.key.replaceChildren(...this.keyOf(run));
      this.plot.replaceChildren(...drawn);
    }
  }

  /** Steps of asynchronous workers over time. */
  class WorkerSteps extends Curves {
    constructor(section) {
      const most = Math.min(64, Math.max(...report.runs.map((run) => run.workerSteps.length)));
      const series = [...Array(most).keys()].map((i) => ({ table: "workers", label: `worker ${i}` }));
      super(section, { title: "Steps by worker", unit: "", isLog: false, series });
      if (report.runs.length > 1) this.addPicker();
    }

    dataOf(run, i) {
      return run.workers[i];
    }

    swatchOf(series) {
      return swatch(hue(this.description.series.indexOf(series)));
    }

    lines() {
      return this.description.series.map((series, i) => ({
        entity: { name: `\u0000${i}` }, // which no run is called: the names of runs hide none of these
        series,
        data: sorted(this.dataOf(report.runs[state.run], i), state.x),
        colour: hue(i),
        dash: dashOf(i),
        name: series.label,
        smooth: null,
      }));
    }
  }

  // ---------------------------------------------------------------- the toolbar

  const choice = (title, options, chosen, act) => {
    const buttons = Object.entries(options).map(([value, name]) => {
      const choose = () => {
        buttons.forEach((other) => other.setAttribute("aria-checked", String(other === made)));
        act(value);
      };
      const made = button(choose, { role: "radio", "aria-checked": String(value === chosen) }, name);
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
    const hide = () => {
      chips.forEach((chip, i) => press(chip, !state.hidden.has(all[i].name)));
      for (const card of cards) if (card instanceof Curves) card.hide();
    };
    const chips = all.map(({ name, i }) => {
      const click = ({ detail }) => {
        if (detail === 2) state.hidden = new Set(all.map((each) => each.name).filter((other) => other !== name));
        else if (!state.hidden.delete(name)) state.hidden.add(name);
        hide();
      };
      const properties = { className: "run", title: `${name}: click hides or shows it, double click shows it alone` };
      return button(click, properties, swatch(hue(i), dashOf(i).length ? "dashed" : ""), make("span", {}, name));
    });
    const showAll = () => {
      state.hidden.clear();
      hide();
    };
    legend.hidden = all.length < 2;
    legend.replaceChildren(...chips, ...(all.length > 2 ? [button(showAll, { className: "all" }, "All")] : []));
    hide();
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
    const chooseX = (x) => {
      state.x = x;
      redraw();
    };
    const chooseSeeds = (value) => {
      state.isMean = value === "mean";
      state.hidden.clear();
      drawLegend();
      redraw();
    };
    const chooseTheme = (theme) => {
      state.theme = theme;
      applyTheme();
    };
    const range = { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 };
    const amount = make("input", { ...range, "aria-label": "Smoothing of training curves" });
    const shown = make("output", {}, "0");
    amount.addEventListener("input", () => {
      state.smoothing = Number(amount.value);
      shown.textContent = amount.value;
      redraw((card) => card instanceof Curves);
    });
    bar.append(choice("x axis", xs, state.x, chooseX));
    if (report.groups.length)
      bar.append(choice("Seeds", { mean: "Mean and band", each: "Every run" }, "mean", chooseSeeds));
    if (report.charts.some((chart) => chart.series.some(({ table }) => table === "train")))
      bar.append(make("label", { className: "choice" }, make("span", {}, "Smoothing"), amount, shown));
    bar.append(choice("Theme", { auto: "Auto", light: "Light", dark: "Dark" }, state.theme, chooseTheme), legend);
    bar.hidden = false;
  };

  // ---------------------------------------------------------------- the page

  for (const name of Object.keys(report.sections)) {
    const section = document.getElementById(name);
    const makers = report.charts
      .filter((chart) => chart.section === name)
      .map((chart) => () => new Curves(section, chart));
    if (name === "speed" && some((run) => run.parts)) makers.splice(1, 0, () => new Parts(section));
    makers.forEach((maker) => maker());
  }
  const ranks = document.getElementById("ranks");
  if (some((run) => run.slowest.ranks.length))
    new BarList(
      ranks,
      "Ranks that others waited for",
      (run) => run.slowest.ranks.map(([name, times]) => ({ name, values: [times], shown: `${times} lines` })),
      (run) => [words(`the slowest rank, if 10 % above the median, in ${run.slowest.lines} lines`)],
    );
  if (some((run) => run.map)) new RankMap(ranks);
  if (some((run) => run.buckets.length))
    new BarList(
      ranks,
      "Exchange by bucket, on rank 0",
      (run) => run.buckets.map(([name, ...values]) => ({ name, values, shown: prefixed(Math.max(...values), "s") })),
      () => [
        swatch("var(--accent)", "filled"),
        words("time a step in flight"),
        swatch("var(--slow)", "filled"),
        words("time that a rank waits for it"),
      ],
    );
  if (some((run) => run.workerSteps.length > 1)) new WorkerSteps(ranks);

  drawToolbar();
  applyTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
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

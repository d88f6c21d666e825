/* Draws the curves of a report from the JSON that stands in the page. No markup is made of its texts. */
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;

  const HUES = {
    light: "#1d5fd1 #d9580d #0a8a5f #b3209e #cc2222 #0c7f99 #7040d8 #8a6100 #56616e #5a8208".split(" "),
    dark: "#6aa8ff #ff9a4d #3fd6a0 #ee86e0 #ff7b7b #3ccbe6 #b39bff #e6be3c #a9b4c0 #a8d84a".split(" "),
  };
  const PART_HUES = { data: 7, transfer: 5, compute: 0, exchange: 1, sync: 4, other: 8 };
  const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]]; // of every further ten lines, or series of a run
  const KINDS = ["", "dashed", "dotted", "dashdot"]; // the same of a swatch
  const XS = { step: "step", epoch: "epoch", elapsed_s: "time" };
  const X_NAMES = { step: "Step", epoch: "Epoch", elapsed_s: "Seconds" };
  const HEIGHT = 260;
  const PRINTED = 640; // pixels of a chart on paper
  const FONT = "12px system-ui, sans-serif";
  const MOST_IN_TIP = 14;
  const FAR = 24; // pixels beyond the end of a line at which it still has a value under the cursor
  const MARKED = 60; // points of a line that are drawn
  const TIME_STEPS = [
    0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
    345600, 864000,
  ];

  // ---------------------------------------------------------------- data

  /** Columns of a series by ascending x. In a long record `y` has the extremes of stretches, and `mean` their means. */
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

  /** `15 s`, `1:15 min` or `2:30 h`. */
  const clock = (seconds) => {
    const rest = (whole) => String(Math.floor((60 * (seconds % whole)) / whole)).padStart(2, "0");
    const pair = (whole) => `${Math.floor(seconds / whole)}:${rest(whole)}`;
    if (seconds < 60) return `${Number(seconds.toPrecision(6))} s`;
    return seconds < 3600 ? `${pair(60)} min` : `${pair(3600)} h`;
  };

  const place = (x) => (state.x === "elapsed_s" ? clock(x) : `${XS[state.x]} ${Number(x.toPrecision(6))}`);

  // ---------------------------------------------------------------- state and elements

  const some = (test) => report.runs.some(test);
  const has = (x) => some((run) => [...run.charts.flat(), run.parts].some((series) => series?.x[x]));

  const state = {
    x: Object.keys(XS).find(has) ?? "step",
    isMean: report.groups.length > 0,
    smoothing: 0,
    hidden: new Set(), // names of runs or groups
    run: 0, // of the figures of one run
    isPrinted: false,
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

  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const hue = (i) => HUES[darkness.matches && !state.isPrinted ? "dark" : "light"][i % 10];
  const dashOf = (i) => Math.floor(i / 10) % DASHES.length;
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

  // ---------------------------------------------------------------- cards

  const cards = [];

  /** Title and buttons, key, plot; `draw` is called when the card is seen and when anything changes. */
  class Card {
    constructor(section, title, hasPicker = false) {
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
      if (hasPicker && report.runs.length > 1) this.addPicker();
      cards.push(this);
      seen.observe(this.element);
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

    refresh() {
      this.isStale = !this.isSeen && !state.isPrinted;
      if (this.isStale) return;
      if (this.picker) this.picker.value = state.run;
      this.draw();
    }

    /** Show lines of text beside the cursor; none without lines. */
    showTip(head, rows, left, top) {
      this.tip.hidden = !rows.length;
      if (!rows.length) return;
      const span = (className, text) => make("span", { className }, text);
      const line = ({ isNear, colour, kind, name, value, extra }) => {
        const cells = [swatch(colour, kind), span("name", name), span("value", value)];
        return make("div", { className: isNear ? "near" : "" }, ...cells, ...(extra ? [span("extra", extra)] : []));
      };
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

  /** A card with a plot of uPlot, whose axis can be zoomed. */
  class Plot extends Card {
    constructor(section, title, hasPicker) {
      super(section, title, hasPicker);
      this.reset = button(() => this.zoomOut(), { hidden: true }, "Reset zoom");
      this.head.append(this.reset);
    }

    zoomOut() {
      this.chart.setData(this.chart.data, true);
      this.reset.hidden = true;
    }

    /** Nothing to draw but a sentence. */
    clear(text) {
      this.chart?.destroy();
      this.chart = null;
      this.plot.replaceChildren(make("p", { className: "made" }, text));
    }

    /** Put a chart in the place of the one before, zoomed as that was. */
    show({ axes, series, bands, cursor, scales }, data, label) {
      const { min, max } = this.chart?.scales.x ?? {};
      const isZoomed = this.chart && !this.reset.hidden && this.shownX === state.x;
      this.shownX = state.x;
      this.chart?.destroy();
      this.plot.textContent = "";
      this.tip.hidden = this.reset.hidden = true;
      this.plot.setAttribute("role", "img");
      this.plot.setAttribute("aria-label", label);
      const noteZoom = (u, scale) => {
        const xs = u.data[0];
        if (scale === "x" && xs.length)
          this.reset.hidden = u.scales.x.min <= xs[0] && u.scales.x.max >= xs[xs.length - 1];
      };
      const options = {
        width: state.isPrinted ? PRINTED : Math.max(this.plot.clientWidth, 120),
        height: HEIGHT,
        legend: { show: false },
        hooks: { setScale: [noteZoom], setCursor: [(u) => this.moved(u)] },
        cursor: { ...CURSOR, ...cursor },
        ...{ axes, series, bands, scales },
      };
      this.chart = new uPlot(options, data, this.plot);
      if (isZoomed) this.chart.setScale("x", { min, max });
      this.chart.over.addEventListener("mouseleave", () => (this.tip.hidden = true));
      this.chart.over.addEventListener("dblclick", () => this.zoomOut());
    }

    /** Values under the cursor, if this is the chart that the reader points to. */
    moved(u) {
      const { left, top, idx } = u.cursor;
      const isThere = u.over.matches(":hover") && left >= 0 && idx !== null && idx !== undefined;
      const { head, rows } = isThere ? this.valuesAt(u, idx) : { rows: [] };
      this.showTip(head, rows, left, top);
    }
  }

  // ---------------------------------------------------------------- axes

  const axis = () => ({ stroke: themed("soft"), grid: { stroke: themed("grid"), width: 1 }, font: FONT });

  const xAxis = () => ({
    ...axis(),
    ticks: { stroke: themed("line"), width: 1, size: 5 },
    size: 34,
    space: 56,
    values: (u, splits) => splits.map((x) => (state.x === "elapsed_s" ? clock(x) : prefixed(x, "", 4))),
    ...(state.x === "elapsed_s" ? { incrs: TIME_STEPS } : {}),
  });

  const yAxis = (unit, isLog = false) => ({
    ...axis(),
    ticks: { show: false },
    size: (u, values) => 14 + 7 * Math.max(3, ...(values ?? []).map((text) => (text ?? "").length)),
    values: (u, splits) => splits.map((y) => prefixed(y, unit, 4)),
    space: 34,
    ...(isLog ? { splits: logSplits, filter: (u, splits) => splits } : {}),
  });

  /** Lines at powers of ten, and between them as far as there is room: uPlot's own have no numbers there. */
  const logSplits = (u, axis, min, max) => {
    const decades = Math.log10(max / min);
    const digits = decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 2, 3, 4, 5, 7];
    const [first, every] = [Math.floor(Math.log10(min)), Math.ceil(decades / 8)];
    const powers = [...Array(Math.ceil(decades) + 2).keys()].filter((i) => i % every === 0).map((i) => first + i);
    return powers.flatMap((power) => digits.map((k) => Number(`${k}e${power}`))).filter((y) => y >= min && y <= max);
  };

  // ---------------------------------------------------------------- curves of all runs

  class Curves extends Plot {
    constructor(section, chart) {
      super(section, chart.title);
      this.description = chart;
      this.number = report.charts.indexOf(chart);
      this.hiddenLabels = new Set();
      this.isLog = chart.isLog && this.spansDecade();
      const setLog = (isOn) => {
        this.isLog = isOn;
        this.refresh();
      };
      this.head.append(toggle(this.isLog, setLog, { "aria-label": `Logarithmic axis of ${chart.title}` }, "Log"));
    }

    spansDecade() {
      let [low, high] = [Infinity, 0];
      for (const run of report.runs)
        for (const value of run.charts[this.number].flatMap((series) => series?.y ?? []))
          if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
      return low > 0 && high >= 10 * low;
    }

    /** Colour and number of dashes of a line: a colour a run, dashes by series; one run alone has a colour a series. */
    look(entity, i) {
      if (this.description.series.length > 2 && entities().length < 2) return [hue(i), dashOf(i)];
      return [hue(entity.i), i ? 1 + ((i - 1) % 3) : dashOf(entity.i)];
    }

    /** The series of a chart that has several, to hide and show. */
    drawKey() {
      const { series, note } = this.description;
      const all = entities();
      const entries = [...series.entries()]
        .filter(([i, { label }]) => label && some((run) => run.charts[this.number][i]))
        .map(([i, { label }]) => {
          const [colour, dash] = this.look(all[0], i);
          const mark = swatch(all.length > 1 ? "currentcolor" : colour, KINDS[dash]);
          return hider(this.hiddenLabels, label, () => this.hide(), mark, label);
        });
      this.key.replaceChildren(...(entries.length > 1 ? entries : []), ...(note ? [words(note)] : []));
    }

    /** Lines with their data: of each run or group, each series of the chart. */
    lines() {
      return entities().flatMap((entity) =>
        this.description.series.map((series, i) => {
          const { table, label } = series;
          const runs = entity.runs.map((k) => sorted(report.runs[k].charts[this.number][i], state.x));
          const data = runs.length > 1 ? overRuns(runs) : runs[0];
          const [colour, dash] = this.look(entity, i);
          return {
            entity,
            series,
            data,
            colour,
            dash,
            name: label && this.description.series.length > 1 ? `${entity.name}, ${label}` : entity.name,
            smooth: state.smoothing > 0 && table === "train" ? smoothed(data.mean, state.smoothing) : null,
          };
        }),
      );
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
        if (data.low) {
          add(line, "high", data.high, { stroke: null, width: 0 });
          add(line, "low", data.low, { stroke: null, width: 0 });
          bands.push({ series: [series.length - 2, series.length - 1], fill: faded(colour, 0.2) });
        }
        if (smooth) add(line, "smooth", smooth, { stroke: colour, width: width + 0.3 });
        const look = smooth ? { stroke: faded(colour, 0.3), width: 1 } : { stroke: colour, width };
        const points = { show: isMarked, size: 5, fill: colour, stroke: colour };
        add(line, "value", data.y, { ...look, dash: DASHES[dash], points });
      }
      const last = ({ name, data }) => `${name}: last ${this.shown(data.y.findLast((y) => y !== null))}`;
      const wide = (u, min, max) => (max - min <= 1e-9 * Math.abs(max) ? [min - 0.5, max + 0.5] : [min, max]);
      const y = this.isLog
        ? { distr: 3, range: (u, min, max) => (min > 0 ? [min / 1.12, max * 1.12] : [0.1, 1]) }
        : { range: this.range };
      this.show(
        {
          cursor: { points: { size: 7 }, dataIdx: this.nearest },
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

    /** From zero if the least value is far below the greatest. */
    range(u, min, max) {
      if (min === null) return [0, 1];
      const isFlat = max - min <= 1e-6 * Math.abs(max); // no ticks would differ
      const pad = isFlat ? Math.abs(max) * 0.1 || 1 : (max - min) * 0.06;
      return [min >= 0 && (min < 0.4 * max || min < pad) ? 0 : min - pad, max + pad];
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
      let [left, right] = [at, at];
      while (left >= 0 && (ys[left] ?? null) === null) left--;
      while (right < ys.length && (ys[right] ?? null) === null) right++;
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
        const k = u.cursor.idxs[i + 1] ?? null;
        if (role !== "value" || !u.series[i + 1].show || k === null) return;
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
        const value = this.shown(y, line.data.low ? 4 : 6);
        const away = Math.abs(u.valToPos(y, "y") - u.cursor.top);
        rows.push({ name: line.name, value, extra, colour: line.colour, kind: KINDS[line.dash], away });
      });
      const nearest = Math.min(...rows.map((row) => row.away));
      if (rows.length > MOST_IN_TIP) rows = rows.toSorted((a, b) => a.away - b.away).slice(0, MOST_IN_TIP);
      for (const row of rows) row.isNear = row.away === nearest && rows.length > 1;
      return { head: place(head), rows };
    }
  }

  // ---------------------------------------------------------------- of one run: parts, ranks

  class Parts extends Plot {
    constructor(section) {
      super(section, "Parts of a step", true);
      this.hiddenParts = new Set();
    }

    draw() {
      const run = report.runs[state.run];
      const names = Object.keys(PART_HUES).filter((part) => run.parts?.y[part]);
      const entries = names.map((part) =>
        hider(this.hiddenParts, part, () => this.draw(), swatch(hue(PART_HUES[part]), "filled"), part),
      );
      const note = run.isLate ? [words("before it is known, an exchange is in compute")] : [];
      this.key.replaceChildren(...entries, ...note);
      this.columns = names
        .filter((part) => !this.hiddenParts.has(part))
        .map((part) => ({ ...sorted(run.parts, state.x, run.parts.y[part]), title: part, colour: hue(PART_HUES[part]) }));
      if (!this.columns.length || !this.columns[0].x.length) return this.clear("No parts of a step.");
      const xs = this.columns[0].x;
      const stacked = (count) => xs.map((_, k) => this.columns.slice(0, count).reduce((sum, { y }) => sum + y[k], 0));
      this.total = stacked(this.columns.length);
      const sums = this.columns.map((_, i) => stacked(i + 1));
      const fills = this.columns.map(({ colour }) => ({ fill: faded(colour, 0.55) }));
      const last = ({ title, y }) => `${title} ${prefixed(y.at(-1), "s")}`;
      const line = { width: 1, points: { show: false } };
      this.show(
        {
          cursor: { points: { show: false } },
          scales: { x: { time: false }, y: { range: (u, min, max) => [0, (max || 1) * 1.04] } },
          axes: [xAxis(), yAxis("s")],
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

  /** A pixel for every rank and step, which the style makes as large as the card. */
  class RankMap extends Card {
    constructor(section) {
      super(section, "A rank's own time, over the median of ranks", true);
      this.canvas = make("canvas", { role: "img", className: "map" });
      this.plot.append(this.canvas);
      this.canvas.addEventListener("mousemove", (event) => this.pointed(event));
      this.canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
    }

    draw() {
      const { map } = report.runs[state.run];
      this.canvas.hidden = !map;
      if (!map) return this.key.replaceChildren(words("nothing is known of this run's ranks"));
      const columns = map.relative.length / map.ranks;
      Object.assign(this.canvas, { width: columns, height: map.ranks });
      const pen = this.canvas.getContext("2d");
      const most = Math.max(1.1, ...map.relative);
      const [slow, fast] = [themed("slow"), themed("fast")];
      map.relative.forEach((value, i) => {
        if (value === null || value === 1) return;
        pen.fillStyle = value > 1 ? slow : fast;
        pen.globalAlpha = Math.min(1, value > 1 ? (value - 1) / (Math.min(most, 2) - 1) : (1 - value) / 0.5);
        pen.fillRect(i % columns, Math.floor(i / columns), 1, 1);
      });
      const group = map.each > 1 ? `; the slowest of every ${map.each} ranks` : "";
      const where = `rank 0 at the top to ${map.ranks * map.each - 1}, step ${map.ends[0]} to ${map.ends[1]}`;
      const slower = `slower, up to ${most.toFixed(2)} times the median${group}`;
      const entries = [swatch(fast, "filled"), words("faster"), swatch(slow, "filled"), words(slower), words(where)];
      this.key.replaceChildren(...entries);
      this.canvas.setAttribute("aria-label", `Map of ranks: ${where}; the slowest ${slower}`);
    }

    pointed({ offsetX, offsetY }) {
      const { map } = report.runs[state.run];
      const columns = map.relative.length / map.ranks;
      const column = Math.min(Math.floor((offsetX / this.canvas.clientWidth) * columns), columns - 1);
      const row = Math.min(Math.floor((offsetY / this.canvas.clientHeight) * map.ranks), map.ranks - 1);
      const value = map.relative[row * columns + column];
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
        const others = all.map((each) => each.name).filter((other) => other !== name);
        // The first click of a double click has hidden it; a second double click shows all again.
        if (detail === 2) state.hidden = new Set(others.every((other) => state.hidden.has(other)) ? [] : others);
        else if (!state.hidden.delete(name)) state.hidden.add(name);
        hide();
      };
      const properties = { className: "run", title: `${name}: click hides or shows it, double click it alone, or all` };
      return button(click, properties, swatch(hue(i), KINDS[dashOf(i)]), make("span", {}, name));
    });
    legend.hidden = all.length < 2;
    legend.replaceChildren(...chips);
    hide();
  };

  const drawAll = () => {
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
      drawAll();
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
    bar.append(legend);
    bar.hidden = false;
  };

  // ---------------------------------------------------------------- the page

  for (const name of Object.keys(report.sections)) {
    const section = document.getElementById(name);
    report.charts
      .filter((chart) => chart.section === name)
      .forEach((chart, i) => {
        new Curves(section, chart);
        if (name === "speed" && i === 0 && some((run) => run.parts)) new Parts(section);
      });
  }
  if (some((run) => run.map)) new RankMap(document.getElementById("ranks"));

  drawToolbar();
  drawAll();
  darkness.addEventListener("change", drawAll);
  addEventListener("resize", () => redraw());
  /** On paper all charts are drawn, in light colours and of one width. */
  const print = (isPrinted) => {
    state.isPrinted = isPrinted;
    root.classList.toggle("paper", isPrinted);
    drawAll();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();

"use strict";
const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const made = (name, parent, text, kind) => {
  const one = document.createElement(name);
  if (text !== undefined) one.textContent = text;
  if (kind) one.className = kind;
  if (parent) parent.append(one);
  return one;
};
const SVG = "http://www.w3.org/2000/svg";
const drawn = (name, parent, attributes) => {
  const one = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  parent.append(one);
  return one;
};
const power = value => "2^" + value;
const percent = level => level === 0 ? "none" : (share => share >= 0.0995 ? (100 * share).toFixed(0) : share >= 0.001 ?
  (100 * share).toPrecision(2) : "under 0.1")(2 ** ((level - 255) / 254 * 16)) + (level === 0 ? "" : "%");
const words = kind => kind.replaceAll("_", " ");

/* float16's range: what is near its ends is what a reader looks for. */
const LOW = -24, HIGH = 16, MIDDLE = -4;

const tints = () => {
  const style = getComputedStyle(document.documentElement);
  const rgb = name => {
    const probe = made("span", document.body);
    probe.style.color = style.getPropertyValue(name);
    const found = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
    probe.remove();
    return found.length === 4 ? [found[0], found[1], found[2], 255 * found[3]] : [...found, 255];
  };
  return Object.fromEntries(["low", "mid", "high", "zero", "nan", "inf"].map(n => [n, rgb("--cell-" + n)]));
};
const shade = (tint, exponent) => {
  const far = exponent < MIDDLE ? (MIDDLE - exponent) / (MIDDLE - LOW) : (exponent - MIDDLE) / (HIGH - 1 - MIDDLE);
  const end = exponent < MIDDLE ? tint.low : tint.high, part = Math.min(1, far) ** 1.1;
  return [0, 1, 2, 3].map(i => tint.mid[i] + part * (end[i] - tint.mid[i]));
};

/* What all paths begin and end with tells no row from another. */
const shortened = names => {
  const paths = names.map(name => name.split("/")), least = Math.min(...paths.map(path => path.length));
  const same = part => new Set(paths.map(part)).size === 1;
  let start = 0, end = 0;
  if (paths.length > 1) {
    while (start < least - 1 && same(path => path[start])) start++;
    while (end < least - 1 - start && same(path => path[path.length - 1 - end])) end++;
  }
  // The marks keep signs at the ends of a name in place, where it is written from the right.
  return row => "\u200e" + paths[row].slice(start, paths[row].length - end).join("/") + "\u200e";
};

const heat = root => {
  const data = JSON.parse(root.querySelector("script").textContent);
  const [cells, bars] = [bytes(data.cells), bytes(data.bars)];
  const find = kind => root.querySelector("." + kind);
  const canvas = find("heat-area").querySelector("canvas"), mark = find("heat-mark"), columns = data.starts.length;
  const kinds = [...new Set(data.tensors.map(tensor => tensor[0]))];
  let shown = [], at = null, every = 1, label = place => "";

  const choice = made("select", made("label", find("heat-top"), "Show "));
  for (const kind of kinds) made("option", choice, words(kind)).value = kind;
  choice.value = kinds.includes("activation_gradients") ? "activation_gradients" : kinds[0];

  const color = (tint, value) => value === 0 ? [0, 0, 0, 0] : value === 1 ? tint.zero : value === 2 ? tint.nan :
    value === 3 ? tint.inf : shade(tint, value - data.first + data.lowest);

  const draw = () => {
    const tint = tints();
    shown = data.tensors.map((tensor, place) => place).filter(place => data.tensors[place][0] === choice.value);
    const high = Math.max(4, Math.min(20, Math.floor(620 / shown.length)));
    canvas.width = columns;
    canvas.height = shown.length;
    canvas.style.height = shown.length * high + "px";
    const context = canvas.getContext("2d"), image = context.createImageData(columns, shown.length);
    shown.forEach((place, row) => {
      for (let column = 0; column < columns; column++)
        image.data.set(color(tint, cells[place * columns + column]), 4 * (row * columns + column));
    });
    context.putImageData(image, 0, 0);
    const rows = find("heat-rows");
    rows.replaceChildren();
    every = Math.ceil(12 / high);
    label = shortened(shown.map(place => data.tensors[place][1]));
    for (let row = 0; row < shown.length; row += every) {
      const one = made("div", rows, label(row));
      one.style.height = one.style.lineHeight = Math.min(every, shown.length - row) * high + "px";
    }
    const steps = find("heat-steps");
    steps.replaceChildren();
    made("span", steps, "step " + data.starts[0].toLocaleString("en"));
    made("span", steps, data.last.toLocaleString("en"));
    legend(tint);
    if (at) point(Math.min(at[0], shown.length - 1), at[1]);
  };

  const legend = tint => {
    const place = find("heat-legend");
    place.replaceChildren();
    const scale = made("div", place, undefined, "heat-scale"), strip = made("canvas", scale);
    [strip.width, strip.height] = [HIGH - LOW, 1];
    strip.setAttribute("aria-hidden", "true");
    const context = strip.getContext("2d"), image = context.createImageData(HIGH - LOW, 1);
    for (let e = LOW; e < HIGH; e++) image.data.set(shade(tint, e), 4 * (e - LOW));
    context.putImageData(image, 0, 0);
    const ends = made("div", scale);
    for (const text of [power(LOW), "float16\u2019s range", "65504"]) made("span", ends, text);
    for (const [name, text] of [["inf", "infinite"], ["nan", "NaN"], ["zero", "all zero"]]) {
      const one = made("span", place), sample = made("i", one);
      sample.style.background = `rgb(${tint[name].slice(0, 3)})`;
      one.append(text);
    }
  };

  const point = (row, column) => {
    row = Math.max(0, Math.min(shown.length - 1, row));
    column = Math.max(0, Math.min(columns - 1, column));
    at = [row, column];
    const [wide, high] = [canvas.clientWidth / columns, canvas.clientHeight / shown.length];
    mark.hidden = false;
    Object.assign(mark.style, { left: column * wide - Math.max(0, 4 - wide / 2) + "px", top: row * high - 1 + "px",
      width: Math.max(8, wide) + "px", height: high + 2 + "px" });
    [...find("heat-rows").children].forEach((one, place) => {
      const on = place === Math.floor(row / every);
      one.classList.toggle("on", on);
      one.textContent = label(on ? row : place * every);
    });
    say(shown[row], column);
  };

  const say = (place, column) => {
    const [kind, layer, format, carries] = data.tensors[place], value = cells[place * columns + column];
    const from = data.starts[column], to = column + 1 < columns ? data.starts[column + 1] - 1 : data.last;
    const when = from >= to ? `step ${from}` : `steps ${from} to ${to}`;
    const size = value === 0 ? "not measured" : value === 1 ? "all zero" : value === 2 ? "a NaN" : value === 3 ?
      "an infinity" : `largest in [${power(value - data.first + data.lowest)}, ${power(value - data.first + data.lowest + 1)})`;
    let text = `${words(kind)} of ${layer}, ${when}: ${size}; computed in ${format}, which holds ` +
      `${power(data.formats[format].low)} to ${data.formats[format].largest}` + (carries ? ", times the loss scale." : ".");
    find("heat-bars").replaceChildren();
    if (data.frames.length) {
      const middle = (from + to) / 2;
      const frame = data.frames.reduce((best, step, i) =>
        Math.abs(step - middle) < Math.abs(data.frames[best] - middle) ? i : best, 0);
      const width = data.bins + 3, start = (frame * data.tensors.length + place) * width;
      const levels = bars.subarray(start, start + width);
      text += levels.some(level => level > 0) ? ` Histogram of step ${data.frames[frame]}: zero ` +
        `${percent(levels[data.bins])}, infinite ${percent(levels[data.bins + 1])}, NaN ${percent(levels[data.bins + 2])}.` :
        ` No histogram of it at step ${data.frames[frame]}.`;
      histogram(levels, data.formats[format]);
    }
    find("heat-said").textContent = text;
  };

  const histogram = (levels, limits) => {
    const left = Math.max(Math.min(data.low, -26), limits.low < -60 ? data.low : limits.low - 2);
    const right = Math.min(Math.max(data.low + data.bins, 18), 130), span = right - left;
    const box = made("div", find("heat-bars"), undefined, "bars");
    const area = drawn("svg", box, { viewBox: `0 0 ${span} 100`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const [low, high] = [Math.max(left, limits.low), Math.min(right, limits.high)];
    drawn("rect", area, { class: "range", x: low - left, y: 0, width: high - low, height: 100 });
    let most = 1;
    for (let i = 0; i < data.bins; i++) if (levels[i]) most = Math.max(most, 2 ** ((levels[i] - 255) / 254 * data.octaves) * 1e6);
    for (let i = 0; i < data.bins; i++) {
      if (!levels[i] || data.low + i < left) continue;
      const tall = Math.max(1.5, 100 * 2 ** ((levels[i] - 255) / 254 * data.octaves) * 1e6 / most);
      drawn("rect", area, { class: data.low + i < limits.normal ? "bar small" : "bar", x: data.low + i - left + 0.08,
        y: 100 - tall, width: 0.84, height: tall });
    }
    const ticks = made("div", box, undefined, "ticks");
    const tick = (where, text) => {
      if (where < left || where > right) return;
      drawn("path", area, { d: `M${where - left} 0V100` });
      const one = made("span", ticks, text);
      one.style.left = Math.max(4, Math.min(94, 100 * (where - left) / span)) + "%";
    };
    tick(limits.low, power(limits.low));
    tick(limits.normal, power(limits.normal));
    tick(0, "1");
    tick(limits.high, limits.largest);
  };

  const seen = event => {
    const box = canvas.getBoundingClientRect();
    point(Math.floor((event.clientY - box.top) / box.height * shown.length),
      Math.floor((event.clientX - box.left) / box.width * columns));
  };
  canvas.addEventListener("pointermove", seen);
  canvas.addEventListener("pointerdown", seen);
  canvas.addEventListener("keydown", event => {
    const [row, column] = at || [0, 0], far = Math.max(1, Math.round(columns / 10));
    const to = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1], PageUp: [row, column - far], PageDown: [row, column + far], Home: [row, 0],
      End: [row, columns - 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    point(...to);
  });
  canvas.addEventListener("focus", () => { if (!at) point(0, 0); });
  choice.addEventListener("change", draw);
  window.addEventListener("resize", () => { if (at) point(...at); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  point(0, columns - 1);
};
document.querySelectorAll(".heat").forEach(heat);

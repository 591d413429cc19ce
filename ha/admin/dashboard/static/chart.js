// A line chart of the last five minutes: an SVG to look at, a sentence and a table that say the same.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300; // seconds
const HEIGHT = 100;
const ROWS = 12;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const formats = {
  number: (value) =>
    value.toLocaleString("en", { maximumFractionDigits: value !== 0 && Math.abs(value) < 100 ? 1 : 0 }),
  size: (value) => {
    let step = 0;
    while (Math.abs(value) >= 1000 && step < UNITS.length - 1) {
      value /= 1024;
      step += 1;
    }
    return `${value.toLocaleString("en", { maximumFractionDigits: step && Math.abs(value) < 100 ? 1 : 0 })} ${UNITS[step]}`;
  },
};

export class Chart {
  // `write` formats a value. A series is a list of {at, time_s, value}: `at` is the time in ms since 1970, for the table;
  // `time_s` is monotonic, in seconds; `value` is null where it is unknown. All series have the same times.
  constructor(figure, write) {
    this.write = write;
    this.title = figure.querySelector("figcaption").textContent;
    this.said = add(figure, "p", "said");
    const plot = add(figure, "div", "plot");
    this.svg = plot.appendChild(svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }));
    this.top = add(plot, "span", "top-value");
    this.top.setAttribute("aria-hidden", "true");
    const axis = add(figure, "p", "axis");
    axis.setAttribute("aria-hidden", "true");
    add(axis, "span").textContent = "5 min ago";
    add(axis, "span").textContent = "now";
    this.legend = add(figure, "ul", "legend");
    this.details = add(figure, "details");
    add(this.details, "summary").textContent = "As a table";
    this.table = add(this.details, "table");
    this.details.addEventListener("toggle", () => this.tabulate());
    this.series = new Map();
    this.now = 0;
  }

  show(series, now) {
    this.series = series;
    this.now = now;
    const points = [...series.values()].flat().filter((point) => point.value !== null && now - point.time_s <= WIDTH);
    const top = ceiling(Math.max(0, ...points.map((point) => point.value)), this.write === formats.size);
    this.top.textContent = this.write(top);
    const grid = [0, HEIGHT / 2, HEIGHT].map((y) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    const lines = [...series.values()].map((line, index) =>
      svg("path", { class: `series s${(index % 4) + 1}`, d: this.path(line, top) }),
    );
    this.svg.replaceChildren(...grid, ...lines);
    this.tell();
    this.tabulate();
  }

  path(line, top) {
    let path = "";
    let isDrawing = false;
    for (const { time_s, value } of line) {
      const x = WIDTH - (this.now - time_s);
      if (value === null || x < 0) {
        isDrawing = false;
        continue;
      }
      path += `${isDrawing ? "L" : "M"}${x.toFixed(1)},${(HEIGHT - (value / top) * HEIGHT).toFixed(1)}`;
      isDrawing = true;
    }
    return path;
  }

  tell() {
    const sentences = [];
    const names = [...this.series.keys()];
    if (this.legend.dataset.names !== names.join()) {
      this.legend.dataset.names = names.join();
      this.legend.replaceChildren(
        ...(names.length > 1 ? names : []).map((name, index) => {
          const item = document.createElement("li");
          const sample = svg("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" });
          sample.append(svg("path", { class: `series s${(index % 4) + 1}`, d: "M0,4L24,4" }));
          item.append(sample, name);
          item.className = "plot";
          return item;
        }),
      );
    }
    for (const [name, line] of this.series) {
      const known = line.filter((point) => point.value !== null && this.now - point.time_s <= WIDTH);
      if (!known.length) continue;
      const most = known.reduce((a, b) => (b.value > a.value ? b : a));
      const prefix = names.length > 1 ? `${name}: ` : "";
      sentences.push(`${prefix}now ${this.write(known.at(-1).value)}, at most ${this.write(most.value)}`);
    }
    this.said.textContent = sentences.join("; ") || (names.length ? "Rates appear after the second sample." : "Nothing to show.");
    this.svg.setAttribute("aria-label", `${this.title}. ${this.said.textContent}`);
  }

  tabulate() {
    if (!this.details.open) return;
    const names = [...this.series.keys()];
    const [line = []] = this.series.values();
    const head = document.createElement("tr");
    for (const text of ["Time", ...names]) add(head, "th").textContent = text;
    head.querySelectorAll("th").forEach((cell) => cell.setAttribute("scope", "col"));
    const rows = line.slice(-ROWS).reverse().map(({ at, time_s }) => {
      const row = document.createElement("tr");
      const time = add(row, "th");
      time.setAttribute("scope", "row");
      time.textContent = new Date(at).toISOString().slice(11, 19);
      for (const name of names) {
        const value = this.series.get(name).find((point) => point.time_s === time_s)?.value;
        add(row, "td", "number").textContent = value === null || value === undefined ? "–" : this.write(value);
      }
      return row;
    });
    this.table.replaceChildren(head, ...rows);
  }
}

function ceiling(value, isSize) {
  if (value <= 0) return 1;
  const unit = isSize ? 1024 ** Math.max(0, Math.floor(Math.log(value) / Math.log(1024))) : 1;
  const power = 10 ** Math.floor(Math.log10(value / unit));
  return Math.max(1, [1, 1.5, 2, 3, 4, 6, 8, 10].find((step) => step * power * unit >= value) * power * unit);
}

function svg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function add(parent, name, className = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  return parent.appendChild(element);
}

// A table of any length: only the rows that are seen exist.

import { el, h, later, patch, perFrame } from "./dom.js";

const SPARE = 6; // rows beyond either edge
export const PLAIN = { class: "plain" }; // a button that looks like text; its row takes the click
const REST_MS = 150; // without a scroll, before rows are put in their order

// A node that shows one row after another: making rows anew costs several times more.
class Row {
  constructor(columns) {
    this.cells = columns.map((column) => h("div", { class: `lt-cell ${column.class ?? ""}`, role: "cell" }));
    this.node = h("div", { role: "row", onclick: () => this.onclick?.() }, this.cells);
  }

  show(index, row, top) {
    this.key = row?.key;
    this.onclick = row?.onclick;
    const kind = `lt-row ${row?.class ?? ""} ${row ? "" : "waiting"}`;
    if (this.kind !== kind) this.node.className = this.kind = kind;
    if (this.top !== top) this.node.style.top = `${top}px`;
    if (this.index !== index) this.node.setAttribute("aria-rowindex", index + 1);
    this.index = index;
    this.top = top;
    this.cells.forEach((cell, k) => patch(cell, row?.cells[k]));
  }

  get isHeld() {
    return this.node.matches(":focus-within, :active");
  }
}

// columns: [{ name, label, class, sort }]; row(index) gives the cells of a row as
// { key, cells: [text or `el`, ...], class, onclick }, or null while it is not there yet. A row whose
// key comes again keeps its node; any other node may show another row, unless it has the focus.
export class LongTable {
  constructor({ columns, row, label, onsort, sorted, kind }) {
    this.row = row;
    this.size = 0;
    this.shown = new Map();
    this.columns = columns;
    this.draw = perFrame(() => this.paint());
    this.settle = later(() => this.order(), REST_MS);
    this.onsort = onsort;
    this.head = h("div", { class: "lt-row lt-head", role: "row" });
    this.mark(sorted);
    this.spacer = h("div", { class: "lt-space" });
    this.body = h("div", { class: "lt-body", role: "rowgroup", tabindex: "0", onscroll: this.draw }, this.spacer);
    this.element = h("div", { class: `lt ${kind}`, role: "table", "aria-label": label }, this.head, this.body);
    this.observer = new ResizeObserver(() => this.measure());
    this.observer.observe(this.body);
  }

  // The headings, with the order that the rows have now.
  mark(sorted) {
    patch(this.head, this.columns.map((column) => this.heading(column, sorted)));
  }

  heading(column, sorted) {
    const order = sorted === column.name ? "ascending" : sorted === `-${column.name}` ? "descending" : null;
    const mark = order === "ascending" ? " ↑" : order === "descending" ? " ↓" : "";
    const inner = column.sort && this.onsort
      ? el("button", { class: "plain", onclick: () => this.onsort(order === "descending" ? column.name : `-${column.name}`) }, column.label + mark)
      : column.label;
    return el("div", { class: `lt-cell ${column.class ?? ""}`, role: "columnheader", "aria-sort": order }, inner);
  }

  // Asked of the style once, and after the size changed: asking costs a layout.
  get height() {
    this.known ??= parseFloat(getComputedStyle(this.element).getPropertyValue("--row")) || 44;
    return this.known;
  }

  // The number of rows changed, or their content did.
  resize(size) {
    this.size = size;
    this.element.setAttribute("aria-rowcount", size);
    this.refresh();
  }

  refresh() {
    this.isStale = true;
    this.draw();
  }

  measure() {
    this.known = undefined;
    this.seen = this.body.clientHeight;
    this.refresh();
  }

  // The first and last row that are seen.
  range() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / this.height) - SPARE);
    return [first, Math.min(this.size, first + Math.ceil((this.seen || 600) / this.height) + 2 * SPARE)];
  }

  paint() {
    const [first, last] = this.range(); // reads before it writes
    const { height, isStale } = this;
    this.isStale = false;
    const whole = `${this.size * height}px`;
    if (this.spacer.style.height !== whole) this.spacer.style.height = whole;
    const free = new Map(); // by their keys
    for (const [index, row] of this.shown) {
      if (!isStale && index >= first && index < last) continue;
      this.shown.delete(index);
      free.set(row.key === undefined || free.has(row.key) ? row : row.key, row);
    }
    const fresh = [];
    for (let index = first; index < last; index += 1) if (!this.shown.has(index)) fresh.push([index, this.row(index)]);
    const place = (row, index, values) => {
      row.show(index, values, index * height);
      this.shown.set(index, row);
    };
    const others = fresh.filter(([index, values]) => {
      const known = free.get(values?.key);
      if (known) place(known, index, values);
      return !free.delete(values?.key);
    });
    const spare = [...free.values()].filter((row) => !row.isHeld || row.node.remove());
    for (const [index, values] of others) {
      const row = spare.pop() ?? new Row(this.columns);
      place(row, index, values);
      if (!row.node.isConnected) this.spacer.append(row.node);
    }
    for (const row of spare) row.node.remove();
    if (!fresh.length) return;
    if (this.spacer.contains(document.activeElement)) this.order();
    else this.settle();
  }

  // Puts the nodes in the order of their rows: keys go through them, and readers of screens. What is
  // moved loses the focus and the selection: of the row that has them the others are moved away.
  order() {
    const nodes = [...this.shown].sort(([a], [b]) => a - b).map(([, row]) => row.node);
    const marked = getSelection();
    const isMarked = (node) => !marked.isCollapsed && marked.containsNode(node, true);
    const isFocused = (node) => node.matches(":focus-within, :active");
    const held = Math.max(0, nodes.findIndex(nodes.some(isFocused) ? isFocused : isMarked));
    for (let k = held + 1; k < nodes.length; k += 1) if (nodes[k - 1].nextSibling !== nodes[k]) nodes[k - 1].after(nodes[k]);
    for (let k = held - 1; k >= 0; k -= 1) if (nodes[k + 1].previousSibling !== nodes[k]) nodes[k + 1].before(nodes[k]);
  }

  scrollTo(index) {
    this.body.scrollTop = Math.max(0, (index - 3) * this.height);
  }

  close() {
    this.observer.disconnect();
  }
}

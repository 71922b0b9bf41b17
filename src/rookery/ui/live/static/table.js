// A table of any length: only the rows that are seen exist.

import { h, perFrame } from "./dom.js";

const SPARE = 6; // rows beyond either edge

// columns: [{ name, label, class, sort }]; row(index) gives the cells of a row as
// { cells: [node, ...], class, href, onclick }, or null while it is not there yet.
export class LongTable {
  constructor({ columns, row, label, onsort, sorted, kind }) {
    this.row = row;
    this.size = 0;
    this.shown = new Map();
    this.columns = columns;
    this.draw = perFrame(() => this.paint());
    this.head = h("div", { class: "lt-row lt-head", role: "row" }, columns.map((c) => this.heading(c, onsort, sorted)));
    this.spacer = h("div", { class: "lt-space" });
    this.body = h("div", { class: "lt-body", role: "rowgroup", tabindex: "0", onscroll: this.draw }, this.spacer);
    this.element = h("div", { class: `lt ${kind}`, role: "table", "aria-label": label }, this.head, this.body);
    this.observer = new ResizeObserver(() => this.measure());
    this.observer.observe(this.body);
  }

  heading(column, onsort, sorted) {
    const order = sorted === column.name ? "ascending" : sorted === `-${column.name}` ? "descending" : null;
    const mark = order === "ascending" ? " ↑" : order === "descending" ? " ↓" : "";
    const inner = column.sort && onsort
      ? h("button", { class: "plain", onclick: () => onsort(order === "descending" ? column.name : `-${column.name}`) }, column.label + mark)
      : column.label;
    return h("div", { class: `lt-cell ${column.class ?? ""}`, role: "columnheader", "aria-sort": order }, inner);
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
    const height = this.height;
    const whole = `${this.size * height}px`;
    if (this.spacer.style.height !== whole) this.spacer.style.height = whole;
    for (const [index, node] of this.shown) {
      if (!this.isStale && index >= first && index < last) continue;
      node.remove();
      this.shown.delete(index);
    }
    this.isStale = false;
    const fresh = [];
    for (let index = first; index < last; index += 1) {
      if (this.shown.has(index)) continue;
      const node = this.make(index);
      node.style.transform = `translateY(${index * height}px)`;
      this.shown.set(index, node);
      fresh.push(node);
    }
    this.spacer.append(...fresh);
  }

  make(index) {
    const row = this.row(index);
    const cells = row?.cells ?? this.columns.map(() => "");
    return h(
      "div",
      { class: `lt-row ${row?.class ?? ""} ${row ? "" : "waiting"}`, role: "row", "aria-rowindex": index + 1, onclick: row?.onclick },
      cells.map((cell, k) => h("div", { class: `lt-cell ${this.columns[k].class ?? ""}`, role: "cell" }, cell)),
    );
  }

  scrollTo(index) {
    this.body.scrollTop = Math.max(0, (index - 3) * this.height);
  }

  close() {
    this.observer.disconnect();
  }
}

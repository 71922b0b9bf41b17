// A table of any length: only the rows that are seen exist.

import { h, perFrame, refill } from "./dom.js";

const SPARE = 6; // rows beyond either edge

// columns: [{ name, label, class, sort }]; row(index) gives the cells of a row as
// { key, cells: [node, ...], class, onclick }, or null while it is not there yet. What a click does
// depends on the key alone: a row with the key that it had is kept, with what is the same in it.
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
      if (index >= first && index < last) continue;
      node.remove();
      this.shown.delete(index);
    }
    const { isStale } = this;
    this.isStale = false;
    let next = this.spacer.firstChild; // rows are in their order: keys go through them
    for (let index = first; index < last; index += 1) {
      const known = this.shown.get(index);
      const node = known && !isStale ? known : this.make(index, known);
      if (!known) this.spacer.insertBefore(node, next);
      else if (node !== known) known.replaceWith(node);
      if (node !== known || isStale) node.style.transform = `translateY(${index * height}px)`;
      this.shown.set(index, node);
      next = node.nextSibling;
    }
  }

  make(index, known) {
    const row = this.row(index);
    const cells = row?.cells ?? this.columns.map(() => "");
    const kind = `lt-row ${row?.class ?? ""} ${row ? "" : "waiting"}`;
    if (row?.key !== undefined && known?.key === row.key) {
      known.className = kind;
      cells.forEach((cell, k) => refill(known.children[k], cell));
      return known;
    }
    const node = h(
      "div",
      { class: kind, role: "row", "aria-rowindex": index + 1, onclick: row?.onclick },
      cells.map((cell, k) => h("div", { class: `lt-cell ${this.columns[k].class ?? ""}`, role: "cell" }, cell)),
    );
    node.key = row?.key;
    return node;
  }

  scrollTo(index) {
    this.body.scrollTop = Math.max(0, (index - 3) * this.height);
  }

  close() {
    this.observer.disconnect();
  }
}

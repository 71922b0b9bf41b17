// What all charts share: the report, numbers as text, tooltips, colours, axes.
// A page joins frame.js, its own files and draw.js, in this order, into one script.
"use strict";

const report = JSON.parse(document.getElementById("report").textContent);

const fixed = (value, digits) => value.toFixed(digits).replace("-", "\u2212");
const score = (value) => (value === null || value === undefined ? "-" : fixed(value, 3));
const count = (value) => value.toLocaleString("en-US");
const short = (value) =>
  Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 }).format(value);
const isNumber = (value) => typeof value === "number";

// A tooltip as nodes: text from the report never becomes markup.
function tip(title, pairs) {
  const box = document.createElement("div");
  box.className = "tip";
  const head = document.createElement("b");
  head.textContent = title;
  const list = document.createElement("dl");
  for (const [term, detail] of pairs) {
    const dt = document.createElement("dt");
    dt.textContent = term;
    const dd = document.createElement("dd");
    dd.textContent = detail;
    list.append(dt, dd);
  }
  box.append(head, list);
  return box;
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "raised", "ink", "muted", "faint", "line", "accent", "wash"];
  return Object.fromEntries(names.map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
}

// What all charts share: fonts, quiet axes, the tooltip's look.
function frame(colours) {
  const font = getComputedStyle(document.body).fontFamily;
  return {
    animation: false,
    backgroundColor: "transparent",
    textStyle: { fontFamily: font, color: colours.ink },
    tooltip: {
      confine: true,
      transitionDuration: 0,
      backgroundColor: colours.raised,
      borderColor: colours.line,
      borderWidth: 1,
      padding: [8, 12],
      textStyle: { color: colours.ink, fontFamily: font },
      extraCssText: "box-shadow: 0 4px 16px rgb(0 0 0 / 0.12); border-radius: 6px;",
    },
  };
}

function axis(colours, options) {
  return {
    nameLocation: "middle",
    nameTextStyle: { color: colours.muted, fontSize: 12 },
    axisLabel: { color: colours.muted, fontSize: 12, hideOverlap: true },
    axisLine: { show: false },
    axisTick: { show: false },
    splitLine: { show: false },
    ...options,
  };
}

// A value axis named above its top end, with hairlines across the chart.
function upright(colours, name, options) {
  return axis(colours, {
    type: "value",
    name,
    nameLocation: "end",
    nameGap: 14,
    nameTextStyle: { color: colours.muted, fontSize: 12, align: "left", padding: [0, 0, 0, -44] },
    splitLine: { show: true, lineStyle: { color: colours.line } },
    ...options,
  });
}

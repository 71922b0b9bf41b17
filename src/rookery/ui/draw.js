// Draws every chart that `kinds` names: at first, after a resize, on light and dark.

const SVG_LIMIT = 3000; // marks that a browser moves smoothly as SVG; more are drawn on canvas

const charts = [...document.querySelectorAll("[data-chart]")].map((box) => {
  const kind = kinds[box.dataset.chart];
  const { height, minWidth = 0 } = kind.size();
  box.style.height = `${height}px`;
  box.style.minWidth = `${minWidth}px`;
  const chart = echarts.init(box, null, { renderer: kind.marks() > SVG_LIMIT ? "canvas" : "svg" });
  const draw = () => {
    const place = { index: Number(box.dataset.index), width: box.clientWidth };
    chart.setOption(kind.draw(palette(), place), { notMerge: true });
  };
  draw();
  kind.ready?.(chart);
  return { box, chart, draw };
});

const redraw = ({ chart, draw }) => {
  chart.resize();
  draw();
};
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const resized = charts.find(({ box }) => box === target);
    if (resized.chart.getWidth() !== target.clientWidth) redraw(resized);
  }
});
charts.forEach(({ box }) => observer.observe(box));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(redraw));

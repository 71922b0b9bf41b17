// A league: accuracy and cost of each entrant, and the difference of every pair.

import { axis, Chart, frame, tip, upright } from "./charts.js";
import { address, choice, emptyNote, figure, folded, h, lead, note, placed, runLink, section, table } from "./dom.js";
import { EvalView } from "./eval.js";
import { comparison, costsLine, scaleOf } from "./report.js";
import { compact, count, interval, isNumber, score, seconds, signed } from "./words.js";

const COSTS = [["seconds", "by time"], ["tokens", "by answer tokens"]];
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

// Average cost of an entrant's seeds; 0 for the untouched model.
function costOf({ runs }, what) {
  const of = { seconds: (run) => run.seconds, drawn: (run) => run.spent?.drawn_tokens ?? 0, trained: (run) => run.spent?.trained_tokens ?? 0 };
  of.tokens = (run) => of.drawn(run) + of.trained(run);
  return mean((runs ?? []).map(of[what]).filter(isNumber)) ?? 0;
}

export class LeagueView extends EvalView {
  drawModels(view, report) {
    this.chart?.close();
    const rows = report.rows ?? [];
    if (!rows.length) {
      const league = decodeURIComponent(this.path.split("/")[1]);
      const runs = this.source.isLive ? h("a", { href: address(["runs"], { q: `${league}.` }) }, "a run of its own") : "a run of its own";
      this.models.replaceChildren(section("Entrants", emptyNote(["Each entrant is ", runs, "."])));
      return;
    }
    const base = rows.find(({ name }) => name === "base");
    const shown = rows.map((row, k) => ({ ...row, is_winner: k === 0, note: row.what }));
    const said = `Each under ${report.budget}, with its seeds averaged task by task; 95 % intervals. The untouched model is the line.`;
    this.cost = placed("cost", COSTS.map(([cost]) => cost));
    this.chart = this.costChart(rows, base);
    const pick = choice("What it cost", COSTS, this.cost, (cost) => { this.cost = cost; note({ cost }); this.chart.redraw(); });
    this.models.replaceChildren(
      section("Entrants", lead(said), comparison({ rows: shown, name: "Entrant", what: "Accuracy", gain: "Gain over base", reference: base }), costsLine(report.summary.costs)),
      section("Accuracy and cost", h("div", { class: "bar" }, pick), figure("Upper left is best: more accuracy for less", this.chart)),
      section("What a seed took", lead("On average. Answer tokens: drawn from the model, and trained on. Every run is a run of its own."), this.costTable(rows)),
      section("Every two", lead("How much the row earned above the column, paired by task. In bold the 95 % interval excludes zero."), this.pairTable(rows, report.pairs ?? [])),
      (report.left_out ?? []).length ? section("Left out", table(["Entrant", "Why"], report.left_out.map((one) => [h("span", { class: "name" }, one.name), one.reason]))) : "");
  }

  costTable(rows) {
    const link = (run) => (this.source.isLive ? h("a", { href: runLink(run) }, run) : run);
    const line = (row) => [
      h("span", { class: "name" }, row.name), count(Math.round(costOf(row, "drawn"))), count(Math.round(costOf(row, "trained"))), seconds(costOf(row, "seconds")),
      row.runs.map((run) => score(run.mean)).join("  "), row.settings || "defaults"];
    const entrants = rows.filter((row) => row.runs?.length);
    const runs = entrants.flatMap((row) => row.runs.map((run) => [h("span", { class: "name" }, run.name), score(run.mean), count(run.spent?.drawn_tokens ?? 0), count(run.spent?.trained_tokens ?? 0), seconds(run.seconds), run.runs?.map((one) => [link(one), " "]) ?? "", run.stop_reason ?? ""]));
    return [table(["Entrant", ["Drawn"], ["Trained"], ["Time"], ["Each seed"], "Settings"], entrants.map(line)), folded("Every seed", () => table(["Seed", ["Accuracy"], ["Drawn"], ["Trained"], ["Time"], "Runs", "Why it ended"], runs))];
  }

  pairTable(rows, pairs) {
    const names = rows.filter((row) => isNumber(row.mean)).map(({ name }) => name);
    const differences = new Map(pairs.map((pair) => [`${pair.first} ${pair.second}`, pair.difference]));
    const cell = (one) => {
      if (!one || !isNumber(one.mean)) return "";
      const isSure = one.low > 0 || one.high < 0;
      return h("span", { title: interval(one.low, one.high) }, isSure ? h("b", null, signed(one.mean)) : signed(one.mean));
    };
    const line = (name) => [h("span", { class: "name" }, name), ...names.slice(1).map((other) => cell(differences.get(`${name} ${other}`)))];
    return table(["", ...names.slice(1).map((name) => [name])], names.slice(0, -1).map(line));
  }

  costChart(rows, base) {
    const option = (colours) => {
      const points = rows.filter((row) => row !== base && isNumber(row.mean)).map((row) => ({ row, value: [costOf(row, this.cost), row.mean, row.low ?? row.mean, row.high ?? row.mean] }));
      const scale = scaleOf(rows) ?? { low: 0, high: 1 };
      const outer = frame(colours);
      const whisker = (params, api) => {
        const [top, end] = [api.coord([api.value(0), api.value(3)]), api.coord([api.value(0), api.value(2)])];
        return { type: "line", shape: { x1: top[0], y1: top[1], x2: end[0], y2: end[1] }, style: { stroke: api.visual("color"), lineWidth: 2 } };
      };
      const series = points.flatMap(({ row, value }, k) => {
        const colour = colours.hues[k % colours.hues.length];
        const shared = { name: row.name, data: [value], itemStyle: { color: colour } };
        return [
          { ...shared, type: "custom", silent: true, renderItem: whisker, encode: { x: 0, y: [2, 3] } },
          { ...shared, type: "scatter", symbolSize: 11, z: 4, label: { show: true, position: "right", formatter: row.name, color: colours.ink, fontSize: 12 } },
        ];
      });
      const line = isNumber(base?.mean) && { type: "line", name: "base", data: [], markLine: { silent: true, symbol: "none", animation: false, label: { formatter: "base", color: colours.muted, position: "insideStartTop" }, lineStyle: { color: colours.faint, type: "dashed" }, data: [{ yAxis: base.mean }] } };
      const name = this.cost === "seconds" ? "Seconds of a seed" : "Answer tokens of a seed, drawn and trained on";
      return {
        ...outer,
        grid: { left: 48, right: 90, top: 24, bottom: 44 },
        tooltip: { ...outer.tooltip, formatter: ({ seriesName, value }) => tip(seriesName, [["Accuracy", `${score(value[1])} (${interval(value[2], value[3])})`], [this.cost === "seconds" ? "Time" : "Answer tokens", this.cost === "seconds" ? seconds(value[0]) : count(Math.round(value[0]))]]) },
        xAxis: axis(colours, { type: "value", name, nameGap: 28, min: 0, axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } }, axisLabel: { color: colours.muted, fontSize: 12, formatter: compact, hideOverlap: true } }),
        yAxis: upright(colours, "Accuracy", { min: scale.low, max: scale.high }),
        series: line ? [...series, line] : series,
      };
    };
    return new Chart({ label: "Accuracy with its interval over what each entrant cost", height: 320, option });
  }

  close() {
    this.chart?.close();
    super.close();
  }
}

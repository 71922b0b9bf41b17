// A training: rewards, how far the policy moves, where the time goes, and what it answered.

import { lineChart } from "./charts.js";
import { emptyNote, errorNote, h, note, place } from "./dom.js";
import { listed, Metrics } from "./source.js";
import { count, isNumber, number } from "./words.js";

// Panels of metrics that belong together; what a run does not measure is left out.
const PANELS = [
  ["Reward", ["reward/"]],
  ["Loss", ["train/loss"], ["train/loss_sum"]],
  ["KL and drift", ["train/kl", "grpo/kl", "grpo/logprob_drift"]],
  ["Gap between engine and trainer", ["grpo/logprob_gap", "train/mismatch"]],
  ["Entropy", ["train/entropy"]],
  ["Clipped share", ["train/clip_"]],
  ["Ratio to the policy that drew", ["train/ratio"]],
  ["Tokens", ["grpo/num_drawn_tokens", "train/num_tokens", "grpo/length"]],
  ["Groups", ["grpo/num_groups", "grpo/num_equal_groups", "grpo/num_failed"]],
  ["Staleness", ["grpo/staleness"]],
  ["Gradient norm", ["train/grad_norm"]],
  ["Learning rate", ["train/learning_rate"]],
  ["Seconds by stage", ["time/"]],
];

export class GrpoView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path });
    this.metrics = new Metrics(source, path, 500);
    this.charts = new Map();
    this.panels = h("div", { class: "panels" });
    this.selects = h("section");
    this.slider = h("input", { type: "range", min: 0, max: 0, "aria-label": "Step", oninput: (e) => this.open(this.steps[Number(e.target.value)]) });
    this.stepName = h("output");
    this.answers = h("div", { class: "answers-of-step" });
    this.element = h("div", null,
      h("section", null, h("h2", null, "The training"), h("p", { class: "lead" }, "Drag to move, Ctrl and wheel to zoom, double-click for all. All metrics are under Curves."), this.panels),
      this.selects,
      h("section", null, h("h2", null, "Completions of a step"), h("div", { class: "bar" }, this.slider, this.stepName), this.answers));
    this.wanted = place().query.get("step");
    this.update(view, report);
  }

  async update(view) {
    this.steps = listed(view, "steps").map((row) => Number(row.id)).sort((a, b) => a - b);
    this.slider.max = Math.max(0, this.steps.length - 1);
    this.slider.disabled = this.steps.length < 2;
    this.drawSelects(listed(view, "selects"));
    if (!this.steps.length) this.answers.replaceChildren(emptyNote("No step is drawn yet."));
    else if (this.shown === undefined || !this.isChosen) this.open(this.wanted !== null && this.steps.includes(Number(this.wanted)) ? Number(this.wanted) : this.steps.at(-1), false);
    try {
      this.drawCurves(await this.metrics.update());
    } catch (error) {
      this.panels.replaceChildren(errorNote(error));
    }
  }

  drawCurves(curves) {
    const names = [...curves.keys()];
    if (!names.length) this.panels.replaceChildren(emptyNote("No step is finished yet."));
    for (const [title, prefixes, without = []] of PANELS) {
      const own = names.filter((n) => prefixes.some((p) => n.startsWith(p)) && !without.includes(n));
      const isStacked = title === "Seconds by stage";
      const series = own.map((n) => ({ name: n.split("/").slice(1).join("/"), points: curves.get(n), isStacked }));
      if (!own.length) continue;
      const known = this.charts.get(title);
      if (known) known.setSeries(series);
      else {
        if (!this.charts.size) this.panels.replaceChildren();
        const chart = lineChart({ label: title, series });
        this.charts.set(title, chart);
        this.panels.append(h("figure", null, h("figcaption", null, title, own.length === 1 && h("span", { class: "note" }, number(curves.get(own[0]).at(-1)?.[1], 4))), chart.box));
      }
    }
  }

  drawSelects(rows) {
    if (!rows.length) return;
    const points = rows.filter((r) => isNumber(r.mean)).map((r) => [Number(r.id), r.mean]);
    const best = rows.filter((r) => r.is_best).at(-1);
    const lead = h("p", { class: "lead" }, best ? `The best so far is the checkpoint of step ${best.id}, with ${number(best.mean)}.` : "");
    if (this.selectChart) this.selectChart.setSeries([{ name: "select tasks", points }]);
    else this.selectChart = lineChart({ label: "Mean reward of each checkpoint on the select tasks", series: [{ name: "select tasks", points }] });
    this.selects.replaceChildren(h("h2", null, "Checkpoints on the select tasks"), lead, this.selectChart.box);
  }

  async open(step, isChosen = true) {
    this.isChosen = isChosen;
    if (step === undefined || this.shown === step) return;
    this.shown = step;
    if (isChosen) note({ step });
    this.slider.value = this.steps.indexOf(step);
    this.stepName.textContent = `step ${step}`;
    try {
      const found = await this.source.get(`${this.path}/step/${step}`);
      if (this.shown === step) this.answers.replaceChildren(...stepNodes(found));
    } catch (error) {
      this.answers.replaceChildren(errorNote(error));
    }
  }

  close() {
    this.charts.forEach((chart) => chart.close());
    this.selectChart?.close();
  }
}

// Each group with its rewards; the colour is the advantage: reward over the mean of its group.
function stepNodes({ groups, is_whole: isWhole }) {
  const lead = isWhole ? `${count(groups.length, "group")} with all their completions.` : "Examples: the other completions of this step were removed with a later checkpoint (`keep_rollouts` keeps them).";
  return [h("p", { class: "lead" }, lead), ...groups.slice(0, 200).map(groupNode)];
}

function groupNode(group) {
  const rewards = group.rollouts.map((r) => r.reward).filter(isNumber);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const most = Math.max(1e-9, ...group.rollouts.map((r) => Math.abs(r.advantage ?? (r.reward ?? mean) - mean)));
  const row = (r) => {
    const advantage = r.advantage ?? (r.reward ?? mean) - mean;
    const node = h("div", { class: `completion-row ${advantage >= 0 ? "up" : "down"}` }, h("span", { class: "figure" }, number(r.reward, 2)), h("span", { class: "figure advantage" }, (advantage >= 0 ? "+" : "") + number(advantage, 2)), h("pre", { class: "answer" }, r.text ?? ""));
    node.style.setProperty("--share", `${Math.round((55 * Math.abs(advantage)) / most)}%`);
    return node;
  };
  return h("article", { class: "group" }, h("h3", null, group.task, h("span", { class: "note" }, ` mean reward ${number(mean, 2)}`)), group.rollouts.map(row));
}

// An evaluation: every task with its answers, right and wrong.

import { choice, emptyNote, errorNote, h, lead, note, place, runLink, section, table } from "./dom.js";
import { comparison, costsLine, sampledSection } from "./report.js";
import { listed } from "./source.js";
import { LongTable } from "./table.js";
import { count, duration, isNumber, number } from "./words.js";

export class EvalView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path });
    const { query } = place();
    this.only = query.get("only") ?? "";
    this.models = h("div");
    this.filter = choice("Which tasks", [["", "all tasks"], ["wrong", "some answer wrong"], ["right", "all answers right"], ["differ", "models differ"], ["failed", "failed"]], this.only, (only) => this.set(only));
    this.state = h("span", { class: "note" });
    this.box = h("div");
    this.detail = h("div", { class: "detail", "aria-live": "polite" }, emptyNote("Choose a task to read its answers."));
    this.element = h("div", null, this.models, section("Answers", h("div", { class: "bar" }, this.filter, this.state), h("div", { class: "split" }, this.box, this.detail)));
    this.update(view, report);
  }

  update(view, report) {
    const tasks = new Map();
    for (const a of listed(view, "answers")) {
      if (!tasks.has(a.task)) tasks.set(a.task, new Map());
      const first = tasks.get(a.task).get(a.model); // what is measured; the further ones are drawn for pass@k
      if (first) first.further.push(a);
      else tasks.get(a.task).set(a.model, { ...a, further: [] });
    }
    this.tasks = [...tasks];
    this.names = [...new Set(listed(view, "answers").map((a) => a.model))];
    this.asked = new Map(report.tasks.map((t) => [t.task, t]));
    this.drawModels(view, report);
    if (this.columns !== this.names.join()) this.makeTable();
    this.arrange();
  }

  drawModels(view, report) {
    const live = this.names.map((name) => {
      const rewards = this.tasks.map(([, answers]) => answers.get(name)?.reward).filter(isNumber);
      return { name, mean: rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null, num_scored: rewards.length };
    });
    const rows = report.models.length ? report.models : live;
    const said = report.models.length ? "Mean reward with its 95 % interval." : "So far, without intervals: they come with the report.";
    const best = rows.reduce((a, b) => (a && (a.mean ?? -Infinity) >= (b.mean ?? -Infinity) ? a : b), null);
    const marked = rows.map((row) => ({ num_failed: 0, ...row, is_winner: rows.length > 1 && row === best }));
    this.models.replaceChildren(this.steps(report), section("Models", lead(said), rows.length ? comparison({ rows: marked, name: "Model", what: "Accuracy", gain: "Gain over base", reference: rows[0] }) : emptyNote("No answer is recorded yet."), costsLine(report.summary.costs)), sampledSection(report));
  }

  // Of a pipeline: each step is a run beside it.
  steps({ steps }) {
    if (!steps?.length) return "";
    const link = ({ name, run }) => (this.source.isLive ? h("a", { class: "name", href: runLink(run) }, name) : h("span", { class: "name" }, name));
    const line = (step) => ({ cells: [link(step), step.loop, step.made_from.join(", "), step.result, duration(step.seconds)] });
    return section("Steps", lead("Each is a run of its own. No step has seen the tasks below."), table(["Step", "Loop", "Made from", ["Result"], ["Took"]], steps.map(line)));
  }

  makeTable() {
    this.columns = this.names.join();
    this.table?.close();
    this.table = new LongTable({ columns: [{ name: "task", label: "Task", class: "run" }, ...this.names.map((n) => ({ name: n, label: n, class: "figure" }))], kind: "tasks", label: "Tasks", row: (i) => this.cells(i) });
    this.box.replaceChildren(this.table.element);
  }

  set(only) {
    this.only = only;
    note({ only });
    this.arrange();
  }

  arrange() {
    const of = (answers) => [...answers.values()];
    const isRight = (a) => isNumber(a.reward) && a.reward > 0;
    const tests = { wrong: (as) => as.some((a) => !isRight(a)), right: (as) => as.every(isRight), differ: (as) => new Set(as.map((a) => a.reward)).size > 1, failed: (as) => as.some((a) => a.is_failed) };
    this.chosen = this.tasks.filter(([, answers]) => !this.only || tests[this.only](of(answers)));
    this.state.textContent = `${count(this.chosen.length)} of ${count(this.tasks.length, "task")}`;
    this.table?.resize(this.chosen.length);
  }

  cells(index) {
    const [task, answers] = this.chosen[index] ?? [];
    if (!task) return null;
    const mark = (a) => (a === undefined ? "" : a.is_failed ? h("b", null, "failed") : h("span", { class: a.reward > 0 ? "right" : "wrong" }, `${a.reward > 0 ? "✓" : "✗"} ${number(a.reward, 2)}`));
    return { onclick: () => this.open(task, answers), cells: [h("button", { class: "plain", onclick: () => this.open(task, answers) }, this.asked.get(task)?.prompt?.slice(0, 120) || task), ...this.names.map((n) => mark(answers.get(n)))] };
  }

  async open(task, answers) {
    try {
      const events = await Promise.all([...answers.values()].flatMap((a) => [a, ...a.further]).map((a) => this.source.get(`${this.path}/event/${a.id}`)));
      const asked = this.asked.get(task);
      const answer = ({ payload }) => [h("h4", null, String(payload.model).split("@")[0], h("span", { class: "note" }, payload.error ? " failed" : ` reward ${number(payload.reward, 2)}`)), h("pre", { class: "answer" }, payload.completion?.text ?? payload.error ?? "")];
      this.detail.replaceChildren(h("h3", null, task), asked ? h("pre", { class: "answer prompt" }, asked.prompt) : "", asked?.reference ? h("p", { class: "note" }, `reference: ${asked.reference}`) : "", ...events.flatMap(answer));
    } catch (error) {
      this.detail.replaceChildren(errorNote(error));
    }
  }

  close() {
    this.table?.close();
  }
}

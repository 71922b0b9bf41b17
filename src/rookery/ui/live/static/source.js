// The source of the data: the server, or the file itself if it is an export.

export const AGAIN_MS = 4000;

class Live {
  isLive = true;

  async get(path, query, body) {
    const kept = Object.entries(query ?? {}).filter(([, v]) => v !== undefined && v !== "");
    const pairs = kept.flatMap(([k, v]) => (Array.isArray(v) ? v.map((one) => [k, one]) : [[k, v]]));
    const tail = pairs.length ? `?${new URLSearchParams(pairs)}` : "";
    let answer;
    try {
      answer = await fetch(`/api/${path}${tail}`, body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    } catch {
      throw new Error("The server does not answer. Is `rookery ui` still running?");
    }
    if (answer.status === 401) throw new Error("The server was started anew: open the address that it printed.");
    const document = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(document.error ?? document.detail?.[0]?.msg ?? `The server answered ${answer.status}.`);
    return document;
  }

  // Calls `onState` with each new state; the stream pauses while the page is hidden.
  follow(path, onState, onLost) {
    let stream = null;
    let timer = 0;
    const open = () => {
      stream = new EventSource(`/api/${path}`);
      stream.onmessage = (message) => onState(JSON.parse(message.data));
      stream.onerror = () => {
        onLost();
        if (stream.readyState === EventSource.CLOSED) timer = setTimeout(look, AGAIN_MS); // refused: the browser does not retry
      };
    };
    const look = () => {
      clearTimeout(timer);
      stream?.close();
      stream = null;
      if (!document.hidden) open();
    };
    document.addEventListener("visibilitychange", look);
    look();
    return () => {
      document.removeEventListener("visibilitychange", look);
      clearTimeout(timer);
      stream?.close();
    };
  }
}

// An exported run: saved responses of the server, and the events.
class Saved {
  isLive = false;

  constructor(saved) {
    this.saved = saved;
  }

  async get(path, query) {
    const { answers, events } = this.saved;
    if (path.endsWith("/events")) {
      const { kind = "", text = "", offset = 0, limit = 100 } = query ?? {};
      const matches = events.filter((row) => (!kind || row[1] === kind) && (!text || row[2].includes(text) || row[3].includes(text)));
      const rows = matches.slice(offset, offset + limit).map((row) => [...row.slice(0, 3), row[3].slice(0, 400), row[4]]);
      return { total: matches.length, rows };
    }
    const seq = /\/event\/(\d+)$/.exec(path)?.[1];
    if (seq) {
      const row = events.find((one) => one[0] === Number(seq));
      if (row) return { seq: row[0], kind: row[1], key: row[2], payload: JSON.parse(row[3]) };
    }
    if (query?.candidate) path += `?candidate=${query.candidate}`;
    if (path in answers) return answers[path];
    throw new Error("This is not part of the exported file.");
  }

  follow() {
    return () => {};
  }
}

// Decompresses the data of an exported file.
async function readSaved(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Saved(JSON.parse(await new Response(stream).text()));
}

export async function openSource() {
  const element = document.getElementById("saved");
  return element ? readSaved(element) : new Live();
}

// Adds changed rows to the known ones, by id.
export function mergeView(known, fresh) {
  const lists = known?.lists ?? {};
  for (const [name, rows] of Object.entries(fresh.lists)) {
    lists[name] ??= new Map();
    for (const row of rows) lists[name].set(row.id, row);
  }
  return { seq: fresh.seq, facts: fresh.facts, isMore: fresh.is_more, lists };
}

// Map from `key(row)` to the rows with that key.
export function grouped(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = key(row);
    if (groups.has(name)) groups.get(name).push(row);
    else groups.set(name, [row]);
  }
  return groups;
}

export const listed = (view, name) => [...(view.lists[name]?.values() ?? [])];

// The curves of a run: loaded once, then extended by the rows written since.
export class Metrics {
  constructor(source, path, points) {
    Object.assign(this, { source, path: `${path}/curves`, points, curves: new Map(), rows: -1, revision: -1 });
  }

  async update() {
    const longest = Math.max(0, ...[...this.curves.values()].map((points) => points.length));
    if (this.rows < 0 || longest > 3 * this.points) return this.load();
    const fresh = await this.source.get(this.path, { points: this.points, after: this.rows });
    const names = Object.keys(fresh.curves);
    if (fresh.revision !== this.revision || names.some((name) => !this.curves.has(name))) return this.load();
    this.rows = fresh.rows;
    for (const name of names) this.curves.get(name).push(...fresh.curves[name]);
    return this.curves;
  }

  async load() {
    const { curves, rows, revision } = await this.source.get(this.path, { points: this.points });
    Object.assign(this, { rows, revision, curves: new Map(Object.entries(curves)) });
    return this.curves;
  }

  // One curve with more points between two steps.
  async zoom(name, first, last) {
    const zoomed = await this.source.get(this.path, { points: this.points, first: Math.max(0, first), last, names: [name] });
    const known = this.curves.get(name);
    return [...known.filter(([x]) => x < first), ...(zoomed.curves[name] ?? []), ...known.filter(([x]) => x > last)];
  }
}

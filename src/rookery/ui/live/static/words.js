// Formats numbers and times for people.

const MINUS = "\u2212";
const WHOLE = new Intl.NumberFormat("en-US"); // made once: constructing a formatter is slow
const TENTHS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const TIME = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  const shown =
    size !== 0 && (size < 0.001 || size >= 1e6)
      ? value.toExponential(2)
      : Number.isInteger(value) && size >= 10
        ? WHOLE.format(value)
        : size >= 1000
          ? TENTHS.format(value)
          : value.toFixed(digits);
  return shown.replace("-", MINUS);
}

// Three decimals as in reports, never a negative zero.
export const score = (value) => (isNumber(value) ? (Math.round(value * 1000) / 1000 + 0).toFixed(3).replace("-", MINUS) : "–");
export const six = (value) => (isNumber(value) ? String(Number(value.toPrecision(6))).replace("-", MINUS) : "–");
export const minus = (text) => text.replace(/-(?=\d)/g, MINUS);

export const signed = (value) => (isNumber(value) && value >= 0 ? "+" : "") + number(value);

export function count(value, noun) {
  const shown = WHOLE.format(value ?? 0);
  return noun ? `${shown} ${noun}${value === 1 ? "" : "s"}` : shown;
}

export const compact = (value) => COMPACT.format(value);

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 1) return "under 1 s";
  if (Math.round(seconds) < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.round(hours / 24)} days`;
}

// Tenths below a minute, then the two largest units, as in reports.
export function seconds(value) {
  if (!isNumber(value)) return "–";
  if (Math.round(value * 10) < 600) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(value / 60);
  return `${count(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

export function ago(unix, now = Date.now() / 1000) {
  if (!unix) return "–";
  const past = now - unix;
  if (past < 5) return "now";
  return `${past < 3600 || past >= 48 * 3600 ? duration(past) : `${Math.round(past / 3600)} h`} ago`;
}

const shownBy = (format) => (unix) => (isNumber(unix) && unix > 0 && unix < 8e12 ? format.format(unix * 1000) : "–"); // a Date holds no later time
export const clock = shownBy(CLOCK);
export const timeOfDay = shownBy(TIME);

export function interval(low, high) {
  return isNumber(low) && isNumber(high) ? `${number(low)} to ${number(high)}` : "";
}

export function progressWords(progress) {
  if (!progress) return "";
  return `${count(Math.round(progress.done))} of ${count(Math.round(progress.total), progress.noun)}`;
}

export function clip(value, most) {
  const shown = String(value ?? "");
  return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown;
}

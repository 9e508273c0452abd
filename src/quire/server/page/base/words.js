// Numbers in words.

export const count = (number) => number.toLocaleString("en");

// "1 block", "2 blocks".
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (bytes >= 1024 && step < units.length - 1) {
    bytes /= 1024;
    step += 1;
  }
  return `${bytes.toFixed(bytes < 10 && step ? 1 : 0)} ${units[step]}`;
}

export const timeOf = (date) => date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

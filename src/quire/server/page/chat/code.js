// Colours of code: comments, strings, numbers and words of a language, by one expression for each family of languages.

const C_LIKE =
  "async|await|break|case|catch|class|const|continue|default|delete|do|else|enum|export|extends|false|final" +
  "|finally|fn|for|from|func|function|go|if|impl|import|in|interface|let|match|mut|namespace|new|nil|null|of|package" +
  "|private|protected|pub|public|return|static|struct|super|switch|this|throw|trait|true|try|type|typeof|undefined" +
  "|union|use|using|var|void|while|yield|bool|char|double|float|int|long|short|string|unsigned";
const SCRIPT =
  "and|as|assert|async|await|break|case|class|continue|def|del|do|done|elif|else|end|esac|except|export|False|false" +
  "|fi|finally|for|from|function|global|if|import|in|is|lambda|local|match|None|nonlocal|not|or|pass|raise" +
  "|return|self|then|True|true|try|unless|until|while|with|yield";
const SQL =
  "all|alter|and|as|asc|begin|between|by|case|commit|create|delete|desc|distinct|drop|else|end|exists|from|group" +
  "|having|if|in|index|inner|insert|into|is|join|left|like|limit|not|null|on|or|order|outer|primary|right|select|set" +
  "|table|then|union|update|values|view|when|where|with";
const STRING = String.raw`"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`;
const expression = (comment, words, string = STRING, flags = "g") =>
  new RegExp(
    `(?<comment>${comment})|(?<string>${string})|(?<number>\\b\\d[\\w.]*\\b)|(?<word>\\b(?:${words})\\b)`,
    flags,
  );
const FAMILIES = [
  [
    expression(String.raw`//.*|/\*[\s\S]*?(?:\*/|$)`, C_LIKE, `${STRING}|\`(?:\\\\.|[^\`\\\\])*\``),
    "c cc cpp c++ h hpp cs csharp cuda css dart go java javascript js json jsonc jsx kotlin php rust rs scala swift" +
      " ts tsx typescript zig",
  ],
  [
    expression("#.*", SCRIPT, String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|` + STRING),
    "bash dockerfile ini make makefile perl py python r rb ruby sh shell toml yaml yml zsh",
  ],
  [expression(String.raw`--.*|/\*[\s\S]*?(?:\*/|$)`, SQL, STRING, "gi"), "sql sqlite mysql postgresql"],
];
const BY_NAME = new Map(FAMILIES.flatMap(([found, names]) => names.split(" ").map((name) => [name, found])));
const MAX_LENGTH = 50000;

// The text as nodes: what has a colour in spans, the rest as it is.
export function paint(text, language) {
  const rule = BY_NAME.get(language.toLowerCase());
  if (!rule || text.length > MAX_LENGTH) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(rule)) {
    const [kind] = Object.entries(match.groups).find(([, value]) => value !== undefined);
    nodes.push(
      text.slice(end, match.index),
      Object.assign(document.createElement("span"), { className: kind, textContent: match[0] }),
    );
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)];
}

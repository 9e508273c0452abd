// The colours: the system's until others are chosen. A script of its own, so that nothing is drawn in the wrong ones.

(() => {
  const KEY = "quire.theme",
    CHOICES = ["system", "light", "dark"],
    dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try {
      return localStorage.getItem(KEY) ?? "system";
    } catch {
      return "system";
    }
  };
  const apply = () => {
    const theme = chosen();
    document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
    const control = document.getElementById("theme");
    if (control) control.setAttribute("aria-label", (control.title = `Theme: ${theme}`));
    dispatchEvent(new Event("themechange"));
  };
  dark.addEventListener("change", apply);
  addEventListener("storage", ({ key }) => {
    if (key === KEY) apply();
  });
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(chosen()) + 1) % CHOICES.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        /* no room */
      }
      apply();
    });
  });
  apply();
})();

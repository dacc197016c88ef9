// Light, dark or as the system has it. A classic script in the head: the choice holds before the
// first paint.
{
  const STORED = "seqserve.theme";
  const NEXT = { auto: "light", light: "dark", dark: "auto" };

  const chosen = () => localStorage.getItem(STORED) ?? "auto";

  function apply(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  apply(chosen());
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => { button.textContent = `Theme: ${chosen()}`; };
    label();
    button.addEventListener("click", () => {
      localStorage.setItem(STORED, NEXT[chosen()] ?? "auto");
      apply(chosen());
      label();
    });
  });
}

// A click on the head of a table's column sorts its rows: numbers descending first, text ascending.
document.addEventListener("click", (event) => {
  const head = event.target.closest("article th");
  if (!head) return;
  const body = head.closest("table").tBodies[0];
  const column = head.cellIndex;
  const text = (row) => row.cells[column].textContent.trim();
  const number = (row) => Number.parseFloat(text(row));
  const numeric = [...body.rows].every((row) => !Number.isNaN(number(row)));
  const ascending = (a, b) => (numeric ? number(a) - number(b) : text(a).localeCompare(text(b)));
  const first = head.dataset.sorted === undefined;
  const up = first ? !numeric : head.dataset.sorted === "down";
  head.dataset.sorted = up ? "up" : "down";
  body.append(...[...body.rows].sort((a, b) => (up ? ascending(a, b) : ascending(b, a))));
});

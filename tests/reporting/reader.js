// A reader's keys on the page of a blinded reading; what is dumped is the file that would be saved
const told = [];
const press = (...keys) => keys.forEach((key) => document.dispatchEvent(new KeyboardEvent("keydown", { key })));
const begin = (name) => { byId("reader").value = name; byId("begin").requestSubmit(); told.push(at + 1); };
const dump = (text) => { document.body.textContent = JSON.stringify([text, told]); };
URL.createObjectURL = (blob) => blob.text().then(dump);
HTMLAnchorElement.prototype.click = () => {};
begin("AB"); press(..."1112", "Enter", ..."3214", "ArrowLeft", "2", "ArrowRight", "Enter", ..."11");
given = {}; begin("CD"); begin("AB"); press("s");

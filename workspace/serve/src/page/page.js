// A conversation with this server, and the heads that each token of an answer computed.
"use strict";

const at = (id) => document.getElementById(id);
const conversation = []; // messages as the API takes them
let tokens = []; // of the last answer: { text, span, row, layers }
let layers = []; // of the model: { heads, active, shared }
let model = null;
let running = null;

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

function show(error) {
  at("fault").hidden = !error;
  at("fault").textContent = error ? error.message : "";
}

async function describe() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await failure(response);
  model = (await response.json()).data[0];
  layers = model.moh.layers;
  document.title = at("name").textContent = model.id;
  const share = layers.reduce((sum, layer) => sum + layer.active / layer.heads, 0) / layers.length;
  const step = model.moh.step === null ? "" : `, step ${model.moh.step}`;
  at("about").textContent = `${layers.length} layers; a token computes ${Math.round(100 * share)}% of the heads; ` +
    `context of ${model.max_model_len} tokens${step}`;
  if (!model.moh.has_chat_template) {
    at("mode").value = "text";
    at("mode-field").hidden = true;
  }
  legend();
  changeMode();
}

function legend() {
  const routes = layers.some((layer) => layer.shared.length < layer.active);
  const entry = (kind, text) => {
    const swatch = document.createElement("span");
    swatch.className = `swatch ${kind}`;
    return [swatch, text];
  };
  at("legend").replaceChildren(
    "A column for each layer, a row for each head: ", ...entry("shared", "always computed"),
    ...(routes ? entry("selected", "selected by the token") : []), ...entry("skipped", "not computed"));
}

function changeMode() {
  at("text-label").textContent = at("mode").value === "chat" ? "Message" : "Text to continue";
}

function message(role, text) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "you" : "model";
  const content = document.createElement("span");
  content.textContent = text;
  box.append(who, content);
  at("messages").append(box);
  return content;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The heads of a token as a picture of a few pixels a head, low enough for a line of a list whatever the number of layers.
function picture(canvas, active) {
  const most = Math.max(...layers.map((layer) => layer.heads));
  const cell = Math.max(2, Math.min(4, Math.floor(40 / most)));
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [layers.length * cell, most * cell];
  [canvas.width, canvas.height] = [width * scale, height * scale];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const [shared, selected, skipped] = ["--shared", "--selected", "--skipped"].map(colour);
  layers.forEach((layer, column) => {
    const own = new Set(layer.shared), computed = new Set(active[column]);
    for (let head = 0; head < layer.heads; head++) {
      context.fillStyle = own.has(head) ? shared : computed.has(head) ? selected : skipped;
      context.fillRect(column * cell, head * cell, cell - 0.5, cell - 0.5);
    }
  });
}

function addToken(content, text) {
  const index = tokens.length;
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  const row = document.createElement("li");
  row.tabIndex = 0;
  const name = document.createElement("code");
  name.textContent = text === "" ? "\u2205" : text.replaceAll("\n", "\u21b5");
  row.append(name);
  for (const element of [span, row]) element.addEventListener("click", () => choose(index));
  row.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(index);
    }
  });
  content.append(span);
  at("tokens-list").append(row);
  tokens.push({ text, span, row, layers: null });
}

function setHeads(token, active) {
  token.layers = active;
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", active.map((heads, layer) => `layer ${layer}: ${heads.join(" ")}`).join("; "));
  token.row.append(canvas);
  picture(canvas, active);
}

function choose(index) {
  for (const token of tokens) {
    token.span.classList.remove("chosen");
    token.row.classList.remove("chosen");
  }
  const token = tokens[index];
  token.span.classList.add("chosen");
  token.row.classList.add("chosen");
  at("chosen").hidden = false;
  at("chosen-token").textContent = JSON.stringify(token.text);
  const cells = (token.layers ?? []).map((heads, layer) => {
    const row = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = layer;
    const list = document.createElement("td");
    list.textContent = heads.join(" ");
    row.append(name, list);
    return row;
  });
  if (!token.layers) {
    const row = document.createElement("tr");
    const cell = document.createElement("td");
    cell.colSpan = 2;
    cell.textContent = "This token ends the answer: it was not computed.";
    row.append(cell);
    cells.push(row);
  }
  at("chosen-layers").replaceChildren(...cells);
}

// The JSON of server-sent events.
async function* events(body) {
  const decoder = new TextDecoder();
  let text = "";
  for (const reader = body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end; (end = text.indexOf("\n\n")) >= 0;) {
      const event = text.slice(0, end).replace(/^data: /, "");
      text = text.slice(end + 2);
      if (event === "[DONE]") return;
      yield JSON.parse(event);
    }
  }
}

async function answer(path, request, content) {
  tokens = [];
  at("tokens-list").replaceChildren();
  at("chosen").hidden = true;
  let first = null; // the position of the first token of the answer
  const response = await fetch(path, {
    method: "POST", headers: headers(), body: JSON.stringify(request), signal: running.signal,
  });
  if (!response.ok) throw await failure(response);
  for await (const part of events(response.body)) {
    if (part.error) throw new Error(part.error.message);
    const choice = part.choices[0];
    if (!choice?.moh_heads) continue;
    for (const { position, layers: active } of choice.moh_heads) {
      first ??= position;
      setHeads(tokens[position - first], active);
    }
    const text = choice.delta ? choice.delta.content ?? "" : choice.text;
    if (choice.finish_reason === null) {
      addToken(content, text);
    } else if (text) {
      content.append(text);
    }
    if (choice.finish_reason === "length") content.title = "ended at the maximum of tokens";
  }
}

async function send(event) {
  event.preventDefault();
  const text = at("text").value;
  if (running || !text) return;
  show(null);
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  const messages = conversation.length;
  try {
    if (!model) await describe();
    const isChat = at("mode").value === "chat";
    const seed = at("seed").value;
    const request = {
      model: model.id, stream: true, moh_heads: true, temperature: Number(at("temperature").value),
      max_tokens: Number(at("tokens").value), ...(seed !== "" && { seed: Number(seed) }),
    };
    at("text").value = "";
    message("user", text);
    const content = message("assistant", "");
    if (isChat) {
      conversation.push({ role: "user", content: text });
      await answer("v1/chat/completions", { ...request, messages: conversation }, content);
      conversation.push({ role: "assistant", content: content.textContent });
    } else {
      await answer("v1/completions", { ...request, prompt: text }, content);
    }
  } catch (error) {
    // A message without an answer would be a second one of the user's in a row.
    conversation.length = Math.min(conversation.length, messages);
    if (error.name !== "AbortError") show(error);
  } finally {
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
    at("text").focus();
  }
}

at("form").addEventListener("submit", send);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = tokens.length = 0;
  at("messages").replaceChildren();
  at("tokens-list").replaceChildren();
  at("chosen").hidden = true;
  show(null);
});
at("mode").addEventListener("change", changeMode);
at("key").addEventListener("change", () => describe().then(() => show(null), show));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { row, layers: active } of tokens) if (active) picture(row.querySelector("canvas"), active);
});
describe().catch(show);

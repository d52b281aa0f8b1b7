// What the page asks the fleet, over fetch: EventSource cannot send a key.

const KEY = "muxserve-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export function headers(more = {}) {
  return key.get() ? { ...more, Authorization: `Bearer ${key.get()}` } : more;
}

// The response to GET `path`, or to POST where there is an `order`.
export function ask(path, order, signal) {
  const how = order === undefined ? { headers: headers(), cache: "no-store" } : {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(order),
  };
  return fetch(path, { ...how, signal });
}

// The data of the server-sent events of `response`, as strings.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}

export async function errorOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}

// Follows the fleet until `signal`: tells each frame, and what is wrong in between ("key" if the server wants another
// one).
export async function follow(onFrame, onTrouble, signal) {
  for (let wait = 1; !signal.aborted; wait = Math.min(wait * 2, 15)) {
    try {
      const response = await ask("ui/events", undefined, signal);
      if (response.status === 401 || response.status === 403) {
        onTrouble("key");
        return;
      }
      if (!response.ok) throw new Error(await errorOf(response));
      let first = true;
      for await (const data of events(response)) {
        // After each connection the server tells everything again.
        onFrame(JSON.parse(data), first);
        first = false;
        wait = 0.5;
      }
      onTrouble("the connection has ended; trying again");
    } catch (error) {
      if (signal.aborted) return;
      onTrouble(`no connection to the fleet (${error.message}); trying again`);
    }
    await new Promise((done) => setTimeout(done, wait * 1000));
  }
}

// Asks the fleet for a change; returns what there is then, or throws why there is none.
export async function change(what, order) {
  const response = await ask(`admin/${what}`, order);
  if (!response.ok) throw new Error(await errorOf(response));
  return (await response.json()).text;
}

// A model that sleeps is woken by whoever asks it something: one that generates by a prompt, others by a text to embed.
export async function wake(model) {
  let response = await ask("v1/completions", { model, prompt: "a", max_tokens: 1 });
  if (response.status === 400 || response.status === 404) response = await ask("pooling", { model, input: "a" });
  if (!response.ok) throw new Error(await errorOf(response));
  return `${model} is awake`;
}

// Runs Perfetto's trace processor, the WebAssembly module of its user interface, behind a Unix socket.
//
// node engine.js DIRECTORY TRACE SOCKET: DIRECTORY has engine_bundle.js and trace_processor.wasm. Prints "ready" after it
// has loaded the trace. Python's `perfetto.trace_processor.TraceProcessor(remote=SOCKET)` connects to it.
"use strict";
const fs = require("fs");
const net = require("net");
const path = require("path");
const vm = require("vm");

const [directory, trace, address] = process.argv.slice(2);

// 1. the environment of a web worker, which the bundle expects
const worker = { location: { href: "" } };
class Request {
  open(_method, url) { this.url = url; }
  send() {
    this.status = 200;
    this.response = new Uint8Array(fs.readFileSync(path.join(directory, path.basename(this.url)))).buffer;
  }
}
Object.assign(globalThis, {
  self: worker, WorkerGlobalScope: class {}, importScripts() {}, XMLHttpRequest: Request,
});
const log = console.log;
console.log = console.warn = () => {};
globalThis.process = undefined; // the module was built for browsers only, and refuses to run where it finds Node
vm.runInThisContext(fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8"));

// 2. the port by which the bundle receives requests and sends replies
let reply = () => {};
const port = { postMessage(bytes) { reply(Buffer.from(bytes)); } };
worker.onmessage({ data: port });

// 3. load the trace; messages are protocol buffers, TraceProcessorRpcStream{msg: TraceProcessorRpc}
function varint(number) {
  const bytes = [];
  for (; number > 127; number = Math.floor(number / 128)) bytes.push((number % 128) | 128);
  return Buffer.from([...bytes, number]);
}
function field(number, bytes) {
  return Buffer.concat([varint(number * 8 + 2), varint(bytes.length), bytes]);
}
const [append, finalize] = [1, 2];
function request(method, ...fields) {
  port.onmessage({ data: new Uint8Array(field(1, Buffer.concat([Buffer.from([16, method]), ...fields]))) });
}
function start() {
  request(append, field(101, fs.readFileSync(trace)));
  request(finalize);
  // 4. serve
  net.createServer((socket) => {
    reply = (bytes) => socket.write(bytes);
    socket.on("data", (bytes) => port.onmessage({ data: new Uint8Array(bytes) }));
  }).listen(address, () => log("ready"));
}
setImmediate(start); // the bundle compiles the module at once, but initialises it in a promise

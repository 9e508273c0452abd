// Pictures: read, scaled down, and kept in a database of this browser, as its local storage has room for a few only.
//
// Messages and drafts have a picture's id and size; a new copy of a message shares its pictures with the old one.

import { newId } from "./conversations.js";

// Models read no more than this of a picture's longer side.
const MAX_SIDE = 1600,
  JPEG_QUALITY = 0.9,
  // A longer PNG becomes a JPEG: a conversation is sent whole with each message.
  MAX_PNG = 1 << 20;
const STORE = "pictures",
  DAY_MS = 86_400_000;
const IS_KEPT_FORM = /^data:image\/(?:jpeg|png|webp);base64,[A-Za-z0-9+/]+=*$/;
// Data URLs by id: of those that were shown or sent, and of those for which the database has no room.
const known = new Map();
let database = null;

// Does something with the store of the pictures, and returns its result once it is written.
async function transact(mode, act) {
  database ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("quire", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  const transaction = (await database).transaction(STORE, mode);
  return new Promise((resolve, reject) => {
    const asked = act(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

// Returns the data URL of a picture; null where this browser does not have it.
export async function dataOf({ id }) {
  if (!known.has(id)) {
    const kept = await transact("readonly", (store) => store.get(id)).catch(() => null);
    if (kept) known.set(id, kept.data);
  }
  return known.get(id) ?? null;
}

// Keeps a picture; returns whether the browser has room for it. Without room it is there until the page is closed.
async function keep({ id }, data) {
  known.set(id, data);
  try {
    await transact("readwrite", (store) => store.put({ data }, id));
    return true;
  } catch {
    return false;
  }
}

// Deletes pictures that have been without a message for a day. Until then another tab's draft may have them, or a
// deletion may be undone.
export async function sweep(used) {
  const now = Date.now();
  const rid = (store, id) => {
    const asked = store.get(id);
    asked.onsuccess = () => {
      const unusedSince = asked.result?.unusedSince ?? now;
      if (now - unusedSince > DAY_MS) store.delete(id);
      else if (asked.result) store.put({ ...asked.result, unusedSince }, id);
    };
    return asked;
  };
  try {
    const ids = await transact("readonly", (store) => store.getAllKeys());
    for (const id of ids) if (!used.has(id)) await transact("readwrite", (store) => rid(store, id));
  } catch {
    /* no database, and nothing in it */
  }
}

// Draws a picture no larger than models read it, without the data around its pixels, such as its place.
function encode(bitmap, type) {
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((each) => Math.max(1, Math.round(each * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height }),
    pen = canvas.getContext("2d");
  // What is transparent is white, as it is for those who look at it, and not the colour that lies below.
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, width, height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, width, height);
  const png = type === "image/jpeg" ? null : canvas.toDataURL("image/png");
  const data = png && png.length <= MAX_PNG ? png : canvas.toDataURL("image/jpeg", JPEG_QUALITY);
  return { width, height, data };
}

// Reads a file; returns the picture, and whether it will outlive the page.
export async function read(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "The file"} is no picture that this browser can read.`);
  }
  const { width, height, data } = encode(bitmap, file.type);
  bitmap.close();
  const picture = { id: newId(), name: file.name ?? "", width, height };
  return { picture, isKept: await keep(picture, data) };
}

// ---- files of conversations ----

const withPictures = (conversations, change) =>
  Promise.all(
    conversations.map(async (conversation) => ({
      ...conversation,
      messages: await Promise.all(
        conversation.messages.map(async (message) =>
          message.pictures ? { ...message, pictures: await Promise.all(message.pictures.map(change)) } : message,
        ),
      ),
    })),
  );

// The conversations with the data of their pictures, for a file.
export const pack = (conversations) =>
  withPictures(conversations, async (picture) => ({ ...picture, data: await dataOf(picture) }));

// The conversations of a file, whose pictures are kept from now on under ids of their own.
export const unpack = (conversations) =>
  withPictures(conversations, async ({ name, width, height, data }) => {
    const picture = { id: newId(), name: String(name ?? ""), width: Number(width) || 1, height: Number(height) || 1 };
    if (IS_KEPT_FORM.test(data)) await keep(picture, data);
    return picture;
  });

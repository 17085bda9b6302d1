// Packs files into a ZIP archive without compression, as pictures and videos are compressed already.
"use strict";
{
  const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
    let value = byte;
    for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
    return value;
  });

  function crc(data) {
    let value = 0xffffffff;
    for (const byte of data) value = TABLE[(value ^ byte) & 255] ^ (value >>> 8);
    return (value ^ 0xffffffff) >>> 0;
  }

  // Little-endian numbers of [bytes, value] each
  function header(...fields) {
    const view = new DataView(new ArrayBuffer(fields.reduce((sum, [bytes]) => sum + bytes, 0)));
    let at = 0;
    for (const [bytes, value] of fields) {
      if (bytes === 2) view.setUint16(at, value, true); else view.setUint32(at, value, true);
      at += bytes;
    }
    return new Uint8Array(view.buffer);
  }

  // files: [{ name, data: Uint8Array }]
  window.zip = (files) => {
    const parts = [], directory = [];
    let offset = 0;
    for (const { name, data } of files) {
      const title = new TextEncoder().encode(name), size = data.length, UTF8 = 0x800, DATE = 0x21;
      const common = [[2, 20], [2, UTF8], [2, 0], [2, 0], [2, DATE], [4, crc(data)], [4, size], [4, size], [2, title.length], [2, 0]];
      const local = header([4, 0x04034b50], ...common);
      parts.push(local, title, data);
      directory.push(header([4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]), title);
      offset += local.length + title.length + size;
    }
    const length = directory.reduce((sum, part) => sum + part.length, 0);
    const end = header([4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, length], [4, offset], [2, 0]);
    return new Blob([...parts, ...directory, end], { type: "application/zip" });
  };
}

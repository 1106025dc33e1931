//! A hub that runs in the test itself: repository information, the file list, and the files, whole or in parts.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What a hub holds of the repository `some/model`, and how it behaves.
#[derive(Default)]
pub struct Hub {
    pub files: BTreeMap<String, Vec<u8>>,
    /// Whether the answer about a revision lists its files; otherwise only the tree does.
    pub lists_siblings: bool,
    /// Whether the hub sends parts of files, or always whole files.
    pub has_parts: bool,
    /// Of the first file that is longer than this, only this many bytes are sent before the connection is closed.
    pub cut: Option<usize>,
    /// The server to which the hub redirects for the files themselves.
    pub elsewhere: Option<SocketAddr>,
    pub was_cut: AtomicBool,
    pub log: Mutex<Vec<Request>>,
}

/// What was asked for, and how much of a body was sent.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
    pub sent: usize,
}

impl Hub {
    pub fn start(self) -> (Arc<Self>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let hub = Arc::new(self);
        let serving = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let hub = serving.clone();
                std::thread::spawn(move || hub.answer(stream.unwrap()));
            }
        });
        (hub, address)
    }

    /// Requests so far for paths with this ending.
    pub fn asked(&self, end: &str) -> Vec<Request> {
        self.log.lock().unwrap().iter().filter(|request| request.path.ends_with(end)).cloned().collect()
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        loop {
            let mut request = String::new();
            if reader.read_line(&mut request).unwrap_or(0) == 0 {
                return;
            }
            let mut headers = BTreeMap::new();
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap_or(0) > 2 {
                let (name, value) = line.split_once(':').unwrap();
                headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
                line.clear();
            }
            let mut words = request.split(' ');
            let (method, target) = (words.next().unwrap(), words.next().unwrap());
            let path = target.split('?').next().unwrap();
            let range = headers.get("range").cloned();
            let (head, mut body) = self.respond(path, range.as_deref());
            let mut cut = false;
            if method == "HEAD" {
                body.clear();
            } else if let Some(most) = self.cut
                && path.ends_with(".safetensors")
                && body.len() > most
                && !self.was_cut.swap(true, Ordering::Relaxed)
            {
                body.truncate(most);
                cut = true;
            }
            self.log.lock().unwrap().push(Request {
                method: method.to_owned(),
                path: path.to_owned(),
                range,
                authorization: headers.get("authorization").cloned(),
                sent: body.len(),
            });
            if stream.write_all(&[head.as_bytes(), &body].concat()).is_err() || cut {
                let _ = stream.shutdown(std::net::Shutdown::Both);
                return;
            }
        }
    }

    /// The head of an answer, and all of its body.
    fn respond(&self, path: &str, range: Option<&str>) -> (String, Vec<u8>) {
        let json = |value: serde_json::Value| {
            let body = value.to_string().into_bytes();
            (
                format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len()),
                body,
            )
        };
        if let Some(rest) = path.strip_prefix("/api/models/some/model") {
            let entry = |(name, bytes): (&String, &Vec<u8>)| serde_json::json!({"type": "file", "oid": "0", "size": bytes.len(), "path": name});
            if rest.starts_with("/tree/") {
                return json(self.files.iter().map(entry).collect());
            }
            let mut info = serde_json::json!({"id": "some/model", "sha": COMMIT});
            if self.lists_siblings {
                info["siblings"] = self.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
            }
            return json(info);
        }
        let name = path.strip_prefix(&format!("/some/model/resolve/{COMMIT}/"));
        let Some((name, bytes)) = name.and_then(|name| Some((name, self.files.get(name)?))) else {
            let body = br#"{"error": "Repository not found"}"#.to_vec();
            let head = format!("X-Error-Code: RepoNotFound\r\nContent-Length: {}\r\n\r\n", body.len());
            return (format!("HTTP/1.1 404 Not Found\r\n{head}"), body);
        };
        let about = format!("X-Repo-Commit: {COMMIT}\r\n");
        if let Some(address) = self.elsewhere {
            let head = format!(
                "HTTP/1.1 302 Found\r\nLocation: http://{address}{path}\r\nX-Linked-Etag: \
                 \"linked-{name}\"\r\nX-Linked-Size: {}\r\n\
                 {about}Content-Length: 0\r\n\r\n",
                bytes.len()
            );
            return (head, Vec::new());
        }
        let about = format!("{about}ETag: \"{name}\"\r\n");
        let part = range.filter(|_| self.has_parts).and_then(|range| {
            let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
            let start: usize = start.parse().ok()?;
            let end = end.parse().map_or(bytes.len(), |end: usize| bytes.len().min(end + 1));
            (start < end).then_some(start..end)
        });
        match part {
            Some(part) => {
                let (last, length) = (part.end - 1, part.len());
                let span = format!("Content-Range: bytes {}-{last}/{}\r\n", part.start, bytes.len());
                let head = format!("HTTP/1.1 206 Partial Content\r\n{about}{span}Content-Length: {length}\r\n\r\n");
                (head, bytes[part].to_vec())
            }
            None => (format!("HTTP/1.1 200 OK\r\n{about}Content-Length: {}\r\n\r\n", bytes.len()), bytes.clone()),
        }
    }
}

/// The files of a directory by name.
pub fn files_of(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

//! Downloads from a hub that runs in the test itself, reached by the environment as a user would set it.
//!
//! One test, in a program of its own, since the environment belongs to the whole process.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use model::{DownloadProgress, Error, Source};

#[path = "it/fixture.rs"]
#[allow(dead_code)]
mod fixture;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Just enough of the hub's interface: repository information, the file list, and the files.
struct Hub {
    files: BTreeMap<String, Vec<u8>>,
    requests: AtomicUsize,
}

impl Hub {
    fn serve(self: Arc<Self>, listener: TcpListener) {
        for stream in listener.incoming() {
            let hub = self.clone();
            std::thread::spawn(move || hub.answer(stream.unwrap()));
        }
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        loop {
            let mut request = String::new();
            if reader.read_line(&mut request).unwrap_or(0) == 0 {
                return;
            }
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap_or(0) > 2 {
                line.clear();
            }
            self.requests.fetch_add(1, Ordering::Relaxed);
            let mut words = request.split(' ');
            let (method, target) = (words.next().unwrap(), words.next().unwrap());
            let path = target.split('?').next().unwrap();
            let (status, kind, body) = self.find(path);
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nX-Repo-Commit: {COMMIT}\r\nETag: \"{}\"\r\n{}\r\n",
                body.len(),
                path.rsplit('/').next().unwrap(),
                if status.starts_with("404") { "X-Error-Code: RepoNotFound\r\n" } else { "" },
            );
            stream.write_all(head.as_bytes()).unwrap();
            if method != "HEAD" {
                stream.write_all(&body).unwrap();
            }
        }
    }

    fn find(&self, path: &str) -> (&'static str, &'static str, Vec<u8>) {
        let json = "application/json";
        if let Some(rest) = path.strip_prefix("/api/models/some/model") {
            return if rest.starts_with("/tree/") {
                let entry = |(name, bytes): (&String, &Vec<u8>)| serde_json::json!({"type": "file", "oid": "0", "size": bytes.len(), "path": name});
                let list: Vec<_> = self.files.iter().map(entry).collect();
                ("200 OK", json, serde_json::to_vec(&list).unwrap())
            } else {
                ("200 OK", json, serde_json::to_vec(&serde_json::json!({"id": "some/model", "sha": COMMIT})).unwrap())
            };
        }
        let file = path.strip_prefix(&format!("/some/model/resolve/{COMMIT}/")).and_then(|name| self.files.get(name));
        match file {
            Some(bytes) => ("200 OK", "application/octet-stream", bytes.clone()),
            None => ("404 Not Found", json, br#"{"error": "Repository not found"}"#.to_vec()),
        }
    }
}

fn files_of(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

#[test]
fn a_hub_id_is_downloaded_once_with_progress() {
    let made = fixture::Fixture::new("BF16", false).sharded().write();
    let mut files = files_of(made.path());
    files.insert("README.md".into(), b"not wanted".to_vec());
    files.insert("pytorch_model.bin".into(), b"not wanted".to_vec());
    let wanted: usize =
        files.iter().filter(|(name, _)| !name.ends_with(".md") && !name.ends_with(".bin")).map(|f| f.1.len()).sum();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let hub = Arc::new(Hub { files, requests: AtomicUsize::new(0) });
    std::thread::spawn({
        let hub = hub.clone();
        move || hub.serve(listener)
    });
    let home = tempfile::TempDir::new().unwrap();
    // SAFETY: the only other threads are the server's, which do not read the environment.
    unsafe {
        std::env::set_var("HF_ENDPOINT", format!("http://{address}"));
        std::env::set_var("HF_HOME", home.path());
        for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"] {
            std::env::remove_var(name);
        }
        for name in ["NO_PROXY", "no_proxy"] {
            std::env::set_var(name, "127.0.0.1");
        }
    }

    let source: Source = "some/model".parse().unwrap();
    let mut steps: Vec<DownloadProgress> = Vec::new();
    let checkpoint = source.resolve(&mut |step| steps.push(step)).unwrap();
    assert_eq!(checkpoint.config, made.open().unwrap().config);
    assert_eq!(checkpoint.tensors().len(), made.open().unwrap().tensors().len());
    let last = steps.last().unwrap();
    assert_eq!((last.bytes, last.total_bytes), (wanted as u64, wanted as u64));
    assert!(steps.is_sorted_by_key(|s| s.bytes));
    let snapshot = home.path().join("hub/models--some--model/snapshots").join(COMMIT);
    assert!(snapshot.join("config.json").exists() && !snapshot.join("README.md").exists());

    // The second time it is in the cache, and nobody asks the hub.
    let before = hub.requests.load(Ordering::Relaxed);
    source.resolve(&mut |_| panic!("downloaded again")).unwrap();
    assert_eq!(hub.requests.load(Ordering::Relaxed), before);

    let error = "some/thing".parse::<Source>().unwrap().resolve(&mut |_| {}).unwrap_err();
    assert!(
        matches!(&error, Error::Download { id, mend, .. } if id == "some/thing" && mend.contains("spelling")),
        "{error}"
    );
    assert!(!error.to_string().contains('\n'));
}

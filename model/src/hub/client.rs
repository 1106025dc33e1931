//! The hub's protocol: what a revision holds, and its files or parts of them.

use std::io::Read;
use std::ops::Range;
use std::time::Duration;

use serde_json::Value;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::{HubOptions, home, is_true, path_variable, variable};
use crate::Error;

const PUBLIC_HUB: &str = "https://huggingface.co";
/// A server that is silent for this long is given up.
const PATIENCE: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(20);
/// Most bytes of an answer that describes a repository.
const MOST_METADATA: u64 = 64 << 20;
/// Most pages of a list of files, and most redirects to the server that describes a file.
const MOST_STEPS: usize = 100;

/// A connection to the hub.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// Why the hub did not do what it was asked.
pub(super) struct Failure {
    /// The reason, as a clause.
    pub reason: String,
    /// What to do about it.
    pub mend: &'static str,
    /// Whether another attempt may succeed.
    pub passing: bool,
}

/// A revision of a repository.
pub(super) struct Revision {
    pub commit: String,
    /// Names of the files in its root.
    pub files: Vec<String>,
}

/// What the hub says about a file before it sends it.
pub(super) struct FileInfo {
    /// The name of the file's content in the cache.
    pub etag: String,
    pub size: Option<u64>,
}

pub(super) const ID: &str = "check the spelling of the id, and set HF_TOKEN if the repository is private";
const REVISION: &str = "check the spelling of the id and of the revision, the part after `@`";
const ACCESS: &str =
    "check the spelling of the id; for a private or gated model, accept its terms on the hub and set HF_TOKEN";
const NETWORK: &str = "check the network and HF_ENDPOINT, or name a directory";
const ENDPOINT: &str = "check HF_ENDPOINT, and try again";

impl Failure {
    /// The hub said something that it should not say.
    pub fn odd(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), mend: ENDPOINT, passing: false }
    }

    /// A connection that broke.
    pub fn broken(error: &std::io::Error) -> Self {
        Self { reason: one_line(&error.to_string()), mend: NETWORK, passing: true }
    }

    /// The error for the user.
    pub fn of(self, id: &str, revision: &str) -> Error {
        Error::Download { id: id.to_owned(), revision: revision.to_owned(), reason: self.reason, mend: self.mend }
    }
}

impl From<ureq::Error> for Failure {
    fn from(error: ureq::Error) -> Self {
        let passing = matches!(error, ureq::Error::Timeout(_) | ureq::Error::Protocol(_));
        Self { reason: one_line(&error.to_string()), mend: NETWORK, passing }
    }
}

impl Client {
    pub fn new(options: &HubOptions) -> Self {
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .user_agent(concat!("warpdraft/", env!("CARGO_PKG_VERSION")));
        let endpoint = options.endpoint.clone().or_else(|| variable("HF_ENDPOINT"));
        let endpoint = endpoint.unwrap_or_else(|| PUBLIC_HUB.to_owned());
        Self { agent: config.build().new_agent(), endpoint: endpoint.trim_end_matches('/').to_owned(), token: token() }
    }

    /// What a revision holds.
    pub fn revision(&self, id: &str, revision: &str) -> Result<Revision, Failure> {
        let url = format!("{}/api/models/{id}/revision/{}", self.endpoint, revision.replace('/', "%2F"));
        let (info, _) = self.json(&url)?;
        let commit = info.get("sha").and_then(Value::as_str).filter(|commit| is_file_name(commit));
        let Some(commit) = commit.map(str::to_owned) else {
            return Err(Failure::odd("the hub names no commit"));
        };
        let names = |list: &Value, key: &str| -> Vec<String> {
            let names = list.as_array().into_iter().flatten().filter_map(|file| file.get(key)?.as_str());
            names.filter(|name| is_file_name(name)).map(str::to_owned).collect()
        };
        if let Some(siblings) = info.get("siblings") {
            return Ok(Revision { commit, files: names(siblings, "rfilename") });
        }
        // A mirror may not list the files there.
        let mut files = Vec::new();
        let mut next = Some(format!("{}/api/models/{id}/tree/{commit}", self.endpoint));
        for _ in 0..MOST_STEPS {
            let Some(url) = next else { return Ok(Revision { commit, files }) };
            let (list, headers) = self.json(&url)?;
            files.extend(names(&list, "path"));
            next = next_page(&headers);
        }
        Err(Failure::odd("the hub's list of files has no end"))
    }

    fn json(&self, url: &str) -> Result<(Value, HeaderMap), Failure> {
        let mut response = self.get(url, None)?;
        let headers = response.headers().clone();
        let bytes = response.body_mut().with_config().limit(MOST_METADATA).read_to_vec()?;
        let value = serde_json::from_slice(&bytes).map_err(|_| Failure::odd("the hub's answer is not JSON"))?;
        Ok((value, headers))
    }

    /// The address of a file.
    pub fn url(&self, id: &str, commit: &str, name: &str) -> String {
        format!("{}/{id}/resolve/{commit}/{name}", self.endpoint)
    }

    /// What the hub says about the file at `url`. The hub itself says it: if it redirects readers to another server,
    /// that server is not asked.
    pub fn file_info(&self, url: &str) -> Result<FileInfo, Failure> {
        let mut url = url.to_owned();
        for _ in 0..MOST_STEPS {
            let request = self.agent.head(&url).config().max_redirects(0).max_redirects_will_error(false).build();
            let request = match &self.token {
                Some(token) => request.header("Authorization", format!("Bearer {token}")),
                None => request,
            };
            let response = request.call()?;
            let headers = response.headers();
            let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
            let elsewhere = text("location").filter(|_| response.status().is_redirection());
            if let (Some(path), None) = (elsewhere.filter(|to| to.starts_with('/')), text("x-linked-etag")) {
                // A path alone stays on the server that redirected.
                let root = url.find("://").and_then(|at| Some(at + 3 + url[at + 3..].find('/')?)).unwrap_or(url.len());
                url = format!("{}{path}", &url[..root]);
                continue;
            }
            if elsewhere.is_none() {
                check(&response)?;
            }
            let etag = text("x-linked-etag").or_else(|| text("etag")).unwrap_or_default();
            let etag = etag.trim_start_matches("W/").trim_matches('"');
            if !is_file_name(etag) {
                return Err(Failure::odd("the hub does not say which version of a file it has"));
            }
            // The length of a redirect is not the file's length.
            let size = text("x-linked-size").or_else(|| text("content-length").filter(|_| elsewhere.is_none()));
            return Ok(FileInfo { etag: etag.to_owned(), size: size.and_then(|size| size.parse().ok()) });
        }
        Err(Failure::odd("the hub sends us in circles"))
    }

    /// Requests the file at `url`, or a part of it. Asked for a part, the hub may still answer with the whole file: the
    /// status is 200 then.
    pub fn get(&self, url: &str, part: Option<&str>) -> Result<Response<Body>, Failure> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(part) = part {
            request = request.header("Range", format!("bytes={part}"));
        }
        let response = request.call()?;
        // The caller handles a part that lies behind the file's end.
        if !(part.is_some() && response.status() == StatusCode::RANGE_NOT_SATISFIABLE) {
            check(&response)?;
        }
        Ok(response)
    }

    /// The bytes `range` of the file at `url`, fewer if the file ends earlier, and the file's length if the hub says
    /// it.
    pub fn bytes(&self, url: &str, range: Range<u64>) -> Result<(Vec<u8>, Option<u64>), Failure> {
        if range.is_empty() {
            return Ok((Vec::new(), None));
        }
        let mut response = self.get(url, Some(&format!("{}-{}", range.start, range.end - 1)))?;
        let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let whole = response.status() == StatusCode::OK;
        let length =
            if whole { text("content-length") } else { text("content-range").and_then(|r| r.rsplit('/').next()) };
        let length = length.and_then(|length| length.parse().ok());
        if !whole && response.status() != StatusCode::PARTIAL_CONTENT {
            return Ok((Vec::new(), length));
        }
        // If the whole file comes, only the wanted part is read; the connection is then dropped.
        let skipped = if whole { range.start } else { 0 };
        let mut reader = response.body_mut().as_reader().take(skipped + (range.end - range.start));
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).map_err(|error| Failure::broken(&error))?;
        bytes.drain(..bytes.len().min(skipped as usize));
        Ok((bytes, length))
    }
}

/// The access token for private and gated models: from the environment, else the one that `hf auth login` has saved.
fn token() -> Option<String> {
    let clean = |text: String| Some(text.trim().to_owned()).filter(|token| !token.is_empty());
    if let Some(token) = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")) {
        return clean(token);
    }
    if variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some_and(|value| is_true(&value)) {
        return None;
    }
    let path = path_variable("HF_TOKEN_PATH").or_else(|| Some(home().ok()?.join("token")))?;
    let text = crate::checkpoint::read_regular(&path).ok()??;
    clean(String::from_utf8(text).ok()?)
}

/// Whether a name is a plain file name, which needs no escaping on disk or in an address.
fn is_file_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
}

/// The address of a list's next page: `<…>; rel="next"`.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get("link")?.to_str().ok()?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_owned())
}

/// Fails if the hub refused.
fn check(response: &Response<Body>) -> Result<(), Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(());
    }
    let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    let code = text("x-error-code").unwrap_or_default();
    let (reason, mend) = match (code, status) {
        ("RepoNotFound", _) => ("there is no such repository".to_owned(), ID),
        ("RevisionNotFound", _) => ("there is no such revision".to_owned(), REVISION),
        ("EntryNotFound", _) => ("a file is not there".to_owned(), REVISION),
        // Without a token, the hub answers this for what does not exist, too.
        (_, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            let said = text("x-error-message").map(|said| format!(" ({})", one_line(said))).unwrap_or_default();
            (format!("access is refused{said}"), ACCESS)
        }
        (_, StatusCode::NOT_FOUND) => ("there is no such repository, revision or file".to_owned(), REVISION),
        (_, StatusCode::TOO_MANY_REQUESTS) => {
            ("the hub has had too many requests".to_owned(), "try again later, or set HF_TOKEN")
        }
        _ => (format!("the hub answers with {status}"), "try again later, or check HF_ENDPOINT"),
    };
    Err(Failure { reason, mend, passing: status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS })
}

/// Text from outside, made fit for a sentence: one line of a sensible length, without control characters.
fn one_line(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    text.trim().trim_end_matches('.').to_owned()
}

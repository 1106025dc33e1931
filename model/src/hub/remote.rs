//! The outline of a model on the hub: what `config.json` and the headers of its weights tell.

use std::path::PathBuf;

use super::HubOptions;
use super::client::{Client, Failure, Revision};
use crate::checkpoint::{Header, LARGEST_HEADER, Outline, RemoteFiles};
use crate::{Error, WeightsMode};

/// Reads the outline of a model.
pub(super) fn outline(options: &HubOptions, id: &str, revision: &str, mode: WeightsMode) -> Result<Outline, Error> {
    let client = Client::new(options);
    let found = client.revision(id, revision).map_err(|failure| failure.of(id, revision))?;
    let files = Remote { client, id: id.to_owned(), revision: revision.to_owned(), found };
    Outline::read(&files, mode)
}

/// The files of a revision, read through the network.
struct Remote {
    client: Client,
    id: String,
    /// As the user named it.
    revision: String,
    found: Revision,
}

impl Remote {
    fn url(&self, name: &str) -> String {
        self.client.url(&self.id, &self.found.commit, name)
    }

    fn failed(&self, failure: Failure) -> Error {
        failure.of(&self.id, &self.revision)
    }
}

impl RemoteFiles for Remote {
    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(&self.id).join(name)
    }

    fn has(&self, name: &str) -> bool {
        self.found.files.iter().any(|file| file == name)
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let read = || {
            let mut response = self.client.get(&self.url(name), None)?;
            Ok(response.body_mut().with_config().limit(LARGEST_HEADER).read_to_vec()?)
        };
        read().map_err(|failure| self.failed(failure))
    }

    fn header(&self, name: &str) -> Result<Header, Error> {
        let url = self.url(name);
        let read = || {
            let (mut bytes, length) = self.client.bytes(&url, 0..8)?;
            let announced = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
            // A file that announces a longer header is refused by these first bytes alone.
            if announced <= LARGEST_HEADER {
                bytes.extend(self.client.bytes(&url, 8..8 + announced)?.0);
            }
            let Some(length) = length else {
                return Err(Failure::odd(format!("the hub does not say how long {name} is")));
            };
            Ok(Header { bytes, file_length: length })
        };
        read().map_err(|failure| self.failed(failure))
    }
}

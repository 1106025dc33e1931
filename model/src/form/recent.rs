//! What is remembered of texts, within bounds.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Most texts that are remembered.
const MOST: usize = 1024;
/// Most bytes of all of them together. The form of a text takes more memory than the text, and long texts have the
/// largest forms. The newest text is remembered whatever its size: the next requests often have the same.
const MOST_BYTES: usize = 16 << 20;

/// Values by their texts. The oldest texts make room for new ones.
pub struct Recent<T> {
    values: HashMap<Arc<str>, T>,
    /// The texts, the oldest first.
    texts: VecDeque<Arc<str>>,
    /// Bytes of all texts.
    bytes: usize,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self { values: HashMap::new(), texts: VecDeque::new(), bytes: 0 }
    }
}

impl<T> Recent<T> {
    /// The value of a text, if it is remembered.
    pub fn get(&self, text: &str) -> Option<&T> {
        self.values.get(text)
    }

    /// Remembers the value of a text. If there is one already, that one stays.
    pub fn insert(&mut self, text: String, value: T) {
        if self.values.contains_key(text.as_str()) {
            return;
        }
        let text: Arc<str> = text.into();
        self.bytes += text.len();
        self.texts.push_back(text.clone());
        self.values.insert(text, value);
        while self.texts.len() > MOST || (self.bytes > MOST_BYTES && self.texts.len() > 1) {
            let Some(oldest) = self.texts.pop_front() else { return };
            self.bytes -= oldest.len();
            self.values.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST, MOST_BYTES, Recent};

    fn numbers(recent: &Recent<usize>) -> Vec<usize> {
        assert_eq!(recent.texts.iter().map(|text| text.len()).sum::<usize>(), recent.bytes);
        assert_eq!(recent.texts.len(), recent.values.len());
        recent.texts.iter().filter_map(|text| recent.get(text)).copied().collect()
    }

    #[test]
    fn the_newest_texts_are_remembered() {
        let mut recent = Recent::default();
        (0..MOST + 2).for_each(|i| recent.insert(i.to_string(), i));
        assert_eq!(numbers(&recent), (2..MOST + 2).collect::<Vec<_>>());
        recent.insert("2".into(), 0);
        assert_eq!(recent.get("2"), Some(&2));
        assert_eq!(recent.get("1"), None);
    }

    #[test]
    fn large_texts_do_not_add_up() {
        let mut recent = Recent::default();
        let long = |digit: usize, bytes| digit.to_string().repeat(bytes);
        for i in 0..9 {
            recent.insert(long(i, MOST_BYTES / 3), i);
            assert!(recent.bytes <= MOST_BYTES);
        }
        assert_eq!(numbers(&recent), [6, 7, 8]);
        recent.insert(long(9, MOST_BYTES + 1), 9);
        assert_eq!(numbers(&recent), [9]);
        recent.insert("short".into(), 10);
        assert_eq!(numbers(&recent), [10]);
    }
}

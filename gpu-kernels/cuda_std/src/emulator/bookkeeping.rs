//! Tests of the emulator's bookkeeping that need no launch. They are for Miri, which cannot switch stacks as a launch
//! does.

use std::panic::Location;
use std::rc::Rc;

use super::clock::{Base, Clock, Counts, Name, join_all};
use super::memory::{Buffer, Hold, Lock, find, read, write};
use super::race::{Mode, Past, Shadow};

fn here() -> &'static Location<'static> {
    Location::caller()
}

/// The clocks of a block's lanes.
fn lanes(block: u32, count: u32) -> Vec<Clock> {
    let base = Rc::new(Base::new(count));
    (0..count).map(|slot| Clock::new(Name::new(block, slot), base.clone())).collect()
}

/// The slot of the lane whose access was in the way, and the mode of that access.
fn past(found: Result<(), Past>) -> Option<(u32, Mode)> {
    found.err().map(|past| {
        assert!(past.site.file().ends_with("bookkeeping.rs"), "{}", past.site);
        (past.name.slot(), past.mode)
    })
}

#[test]
fn lanes_that_have_not_met_race_and_others_do_not() {
    let (mut lanes, mut shadow) = (lanes(3, 4), Shadow::new(10_000));
    let mut access = |lane: &Clock, bytes, mode| past(shadow.access(bytes, mode, lane, here()));
    // The access crosses a border between two pages of the shadow.
    assert_eq!(access(&lanes[0], 4080..4112, Mode::Write), None);
    assert_eq!(access(&lanes[0], 4080..4084, Mode::Read), None);
    assert_eq!(access(&lanes[1], 4108..4110, Mode::Read), Some((0, Mode::Write)));
    assert_eq!(access(&lanes[1], 4112..4116, Mode::Write), None);
    join_all(lanes.iter_mut());
    assert_eq!(access(&lanes[1], 4108..4110, Mode::Read), None);
    assert_eq!(access(&lanes[2], 4108..4110, Mode::Read), None);
    assert_eq!(access(&lanes[3], 4108..4109, Mode::Write), Some((2, Mode::Read)));
    // Bytes of one granule of 16 bytes are in different granules once the page is refined.
    assert_eq!(access(&lanes[3], 4110..4111, Mode::Write), None);
    assert_eq!(access(&lanes[1], 0..4, Mode::AtomicWrite), None);
    assert_eq!(access(&lanes[2], 0..4, Mode::AtomicWrite), None);
    assert_eq!(access(&lanes[3], 0..4, Mode::Read), Some((2, Mode::AtomicWrite)));
}

#[test]
fn what_is_published_is_known_to_who_learns_it() {
    let (writer, mut reader) = (lanes(0, 32).remove(5), lanes(7, 32).remove(9));
    let mut shadow = Shadow::new(64);
    assert_eq!(past(shadow.access(0..64, Mode::Write, &writer, here())), None);
    assert_eq!(past(shadow.access(32..36, Mode::Read, &reader, here())), Some((5, Mode::Write)));
    let mut counts = Counts::default();
    writer.publish(&mut counts);
    reader.learn(&counts);
    assert_eq!(past(shadow.access(32..36, Mode::Read, &reader, here())), None);
    let found = shadow.find_writer(60..64, |name, epoch| (name, epoch) == (writer.name, 1));
    assert_eq!(found.map(|past| past.name), Some(writer.name));
}

#[test]
fn a_copy_races_until_it_has_landed() {
    let (mut lanes, mut shadow) = (lanes(0, 2), Shadow::new(64));
    let [first, second] = [lanes[0].clone(), lanes[1].clone()];
    assert_eq!(past(shadow.access(0..32, Mode::CopyWrite, &first, here())), None);
    assert_eq!(past(shadow.access(16..20, Mode::Read, &first, here())), Some((0, Mode::CopyWrite)));
    shadow.land(0..32, Mode::CopyWrite, first.name, first.count, here());
    assert_eq!(past(shadow.access(16..20, Mode::Read, &first, here())), None);
    assert_eq!(past(shadow.access(16..20, Mode::Read, &second, here())), Some((0, Mode::Write)));
    join_all(lanes.iter_mut());
    assert_eq!(past(shadow.access(16..20, Mode::Read, &lanes[1], here())), None);
}

#[test]
fn what_is_read_as_constant_is_never_written() {
    let (lanes, mut shadow) = (lanes(0, 2), Shadow::new(64));
    assert_eq!(past(shadow.access(8..16, Mode::ReadConstant, &lanes[0], here())), None);
    assert_eq!(past(shadow.access(0..8, Mode::Write, &lanes[0], here())), None);
    assert_eq!(past(shadow.access(15..16, Mode::Write, &lanes[0], here())), Some((0, Mode::ReadConstant)));
    assert_eq!(past(shadow.access(4..8, Mode::ReadConstant, &lanes[0], here())), Some((0, Mode::Write)));
    shadow.clear();
    assert_eq!(past(shadow.access(15..16, Mode::Write, &lanes[1], here())), None);
}

#[test]
fn memory_is_found_by_every_address_of_it_and_by_none_beyond() {
    let buffer = Buffer::from_slice(&[1u32, 2, 3]).named("three");
    let start = buffer.ptr().addr();
    assert_eq!(buffer.to_vec(), [1, 2, 3]);
    let allocation = find(start + 11).unwrap();
    assert_eq!((allocation.start() as u64, allocation.len()), (start, 12));
    assert_eq!(find(start + 12).unwrap_err(), "0 bytes past the end of buffer `three` ([u32; 3])");
    assert!(find(1).is_err());
    drop((buffer, allocation));
    assert!(find(start + 4).map_or(true, |other| other.start() as u64 != start));
}

#[test]
fn every_byte_is_known_to_be_written_or_not() {
    let mut buffer = Buffer::<u8>::new_poisoned(100);
    let initialised = &find(buffer.ptr().addr()).unwrap().initialised;
    assert!(!initialised.covers(0..1) && initialised.covers(50..50));
    initialised.add(3..37);
    assert!(initialised.covers(3..37) && !initialised.covers(2..4) && !initialised.covers(36..38));
    buffer.copy_from(&[7; 100]);
    assert!(initialised.covers(0..100));
    assert_eq!(buffer.to_vec(), [7; 100]);
    buffer.poison();
    assert!((0..100).all(|byte| !initialised.covers(byte..byte + 1)));
    assert_eq!(buffer.to_vec(), [0xff; 100]);
    assert_eq!(Buffer::zeroed(5).to_vec(), [0; 5]);
}

#[test]
fn bytes_are_copied_by_their_address() {
    let buffer = Buffer::<u16>::new_poisoned(4);
    let start = buffer.ptr().addr();
    write(start + 2, &[1, 0, 2, 0]);
    assert_eq!(buffer.to_vec(), [0xffff, 1, 2, 0xffff]);
    let initialised = &find(start).unwrap().initialised;
    assert!(initialised.covers(2..6) && !initialised.covers(1..2) && !initialised.covers(6..7));
    let mut out = [0; 3];
    read(start + 4, &mut out);
    assert_eq!(out, [2, 0, 0xff]);
    // An empty copy may be of any address.
    read(1, &mut []);
    write(start + 8, &[]);
}

#[test]
#[should_panic(expected = "5 bytes from byte 4 of buffer [u16; 4] on are out of bounds")]
fn bytes_beyond_a_buffer_are_not_copied() {
    let buffer = Buffer::<u16>::new_poisoned(4);
    write(buffer.ptr().addr() + 4, &[0; 5]);
}

#[test]
fn several_read_and_who_writes_is_alone() {
    let buffer = Buffer::from_slice(&[1u32, 2]).named("two");
    let allocation = || find(buffer.ptr().addr()).unwrap();
    let mut first = Hold::read(allocation()).unwrap();
    let second = Hold::read(allocation()).unwrap();
    assert_eq!(buffer.to_vec(), [1, 2]);
    let busy = "buffer `two` ([u32; 2]) is written here while it is used elsewhere";
    assert_eq!(first.begin_to_write().unwrap_err(), busy);
    assert_eq!(Hold::write(allocation()).unwrap_err(), busy);
    drop(second);
    first.begin_to_write().unwrap();
    first.begin_to_write().unwrap();
    let busy = "buffer `two` ([u32; 2]) is used here while it is written elsewhere";
    assert_eq!(Hold::read(allocation()).unwrap_err(), busy);
    assert_eq!(Hold::write(allocation()).unwrap_err(), busy);
    drop(first);
    assert!(Hold::write(allocation()).is_ok() && Hold::write(allocation()).is_ok());
}

#[test]
fn a_locked_buffer_is_not_written() {
    let buffer = Buffer::from_slice(&[1u32, 2]);
    let [start, second] = [0, 4].map(|offset| buffer.ptr().addr() + offset);
    let lock = Lock::to_read(second);
    assert_eq!(buffer.to_vec(), [1, 2]);
    assert!(std::panic::catch_unwind(|| write(start, &[0])).is_err());
    drop(lock);
    let lock = Lock::to_write(second);
    assert!(std::panic::catch_unwind(|| read(start, &mut [0])).is_err());
    drop(lock);
    write(start, &[5]);
    assert_eq!(buffer.to_vec(), [5, 2]);
}

#[test]
fn threads_that_hold_a_buffer_hand_it_on() {
    let buffer = Buffer::from_slice(&[0u32]);
    let address = buffer.ptr().addr();
    let add = || {
        for _ in 0..20 {
            let mut hold = loop {
                match Hold::write(find(address).unwrap()) {
                    Ok(hold) => break hold,
                    Err(_) => std::thread::yield_now(),
                }
            };
            hold.begin_to_write().unwrap();
            // SAFETY: the buffer's word, held.
            unsafe { *hold.start().cast::<u32>() += 1 };
        }
    };
    std::thread::scope(|scope| [0; 2].map(|_| scope.spawn(add)).map(|thread| thread.join().unwrap()));
    assert_eq!(buffer.to_vec(), [40]);
}

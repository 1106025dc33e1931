//! Measuring what a device does: events around enqueued work, and work that is enqueued once and replayed.

use std::cell::Cell;
use std::time::Instant;

use cust::event::{Event, EventFlags, EventStatus};
use cust::stream::StreamWaitEventFlags;
use cust::sys;

use super::cuda::{Cuda, check};
use super::{Device, DeviceKind};
use crate::Error;

impl Device {
    /// A stopwatch that the device itself reads.
    ///
    /// # Errors
    /// A driver error.
    pub fn timer(&self) -> Result<Timer, Error> {
        let clock = match &*self.0 {
            DeviceKind::Cuda(cuda) => {
                cuda.enter()?;
                let event = || Event::new(EventFlags::DEFAULT).map_err(Error::driver("making an event"));
                Clock::Events(event()?, event()?)
            }
            DeviceKind::Emulator(_) => Clock::Host(Cell::new(Instant::now()), Cell::new(Instant::now())),
        };
        Ok(Timer { clock, device: self.clone() })
    }

    /// Makes what is enqueued here from now on wait for what is enqueued on `other`, another queue of this card, so
    /// far.
    ///
    /// # Errors
    /// A driver error.
    pub fn wait_for(&self, other: &Device) -> Result<(), Error> {
        let marker = other.marker()?;
        marker.set()?;
        let (DeviceKind::Cuda(here), Some(event)) = (&*self.0, marker.event) else { return Ok(()) };
        here.enter()?;
        here.stream()
            .wait_event(event, StreamWaitEventFlags::DEFAULT)
            .map_err(Error::driver("waiting for another queue"))
    }

    /// A point of this queue, still to be set.
    ///
    /// # Errors
    /// A driver error.
    pub fn marker(&self) -> Result<Marker, Error> {
        let event = match &*self.0 {
            DeviceKind::Cuda(cuda) => {
                cuda.enter()?;
                Some(Event::new(EventFlags::DISABLE_TIMING).map_err(Error::driver("making an event"))?)
            }
            DeviceKind::Emulator(_) => None,
        };
        Ok(Marker { event, device: self.clone() })
    }

    /// Records what `work` enqueues on this device, without running it, as one thing to launch.
    ///
    /// `work` may launch kernels, clear and copy buffers, and copy to and from [`super::Pinned`] memory; to wait, to
    /// allocate and to touch other memory of the host is refused. Launch its kernels once before: the first launch of a
    /// kernel may load it. The graph borrows what `work` borrows, and buffers of this queue that go all the same are
    /// freed when no graph of it is left. The emulator runs `work` at every launch of the graph instead.
    ///
    /// What `work` promises of [addresses](Self::launch) holds for every launch of the graph.
    ///
    /// # Errors
    /// [`Error::Recording`] for what cannot be recorded, whatever else `work` fails with, or the driver's refusal of
    /// what it enqueued.
    pub fn capture<'w>(&self, mut work: impl FnMut() -> Result<(), Error> + 'w) -> Result<Graph<'w>, Error> {
        let recorded = match &*self.0 {
            DeviceKind::Cuda(cuda) => {
                let _recording = cuda.recording().begin()?;
                cuda.recording().keep();
                Some(record(cuda, &mut work).inspect_err(|_| cuda.let_go())?)
            }
            DeviceKind::Emulator(_) => None,
        };
        Ok(Graph { recorded, work: Box::new(work), device: self.clone() })
    }
}

/// A point of a queue.
pub struct Marker {
    // Before the device: it lives in its context. None under the emulator, where nothing is ever under way.
    event: Option<Event>,
    device: Device,
}

// SAFETY: an event is a handle that any thread may pass to the driver.
unsafe impl Send for Marker {}

impl Marker {
    /// Sets it behind everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    pub fn set(&self) -> Result<(), Error> {
        self.event.as_ref().map_or(Ok(()), |event| record_event(&self.device, event))
    }

    /// Waits until what was enqueued before it is done, whatever was enqueued since. Before one that was never set
    /// there is nothing.
    ///
    /// # Errors
    /// Whatever a kernel failed with.
    pub fn wait(&self) -> Result<(), Error> {
        let Some(event) = &self.event else { return Ok(()) };
        event.synchronize().map_err(Error::driver("running the kernels"))
    }

    /// Whether what was enqueued before it is done.
    ///
    /// # Errors
    /// Whatever a kernel failed with.
    pub fn is_passed(&self) -> Result<bool, Error> {
        let Some(event) = &self.event else { return Ok(true) };
        event.query().map(|status| status == EventStatus::Ready).map_err(Error::driver("running the kernels"))
    }
}

/// Device time between two points of a queue.
pub struct Timer {
    // Before the device: events live in its context.
    clock: Clock,
    device: Device,
}

enum Clock {
    Events(Event, Event),
    Host(Cell<Instant>, Cell<Instant>),
}

// SAFETY: events are handles that any thread may pass to the driver; the cells move with their owner.
unsafe impl Send for Timer {}

impl Timer {
    /// Starts it after everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    pub fn start(&self) -> Result<(), Error> {
        match &self.clock {
            Clock::Events(start, _) => record_event(&self.device, start),
            Clock::Host(start, _) => {
                start.set(Instant::now());
                Ok(())
            }
        }
    }

    /// Stops it after everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    pub fn stop(&self) -> Result<(), Error> {
        match &self.clock {
            Clock::Events(_, stop) => record_event(&self.device, stop),
            Clock::Host(_, stop) => {
                stop.set(Instant::now());
                Ok(())
            }
        }
    }

    /// Milliseconds from start to stop; waits for both.
    ///
    /// # Errors
    /// A timer that was not started and stopped, or whatever the work between failed with.
    pub fn elapsed_ms(&self) -> Result<f64, Error> {
        match &self.clock {
            Clock::Events(start, stop) => {
                stop.synchronize().map_err(Error::driver("running the kernels"))?;
                stop.elapsed_time_f32(start).map(f64::from).map_err(Error::driver("reading the time"))
            }
            Clock::Host(start, stop) => Ok(stop.get().duration_since(start.get()).as_secs_f64() * 1e3),
        }
    }

    /// Milliseconds that what `work` enqueues takes; waits for it.
    ///
    /// # Errors
    /// Whatever `work` fails with.
    pub fn time(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
        self.start()?;
        work()?;
        self.stop()?;
        self.elapsed_ms()
    }
}

/// Puts `event` behind everything enqueued on `device` so far.
fn record_event(device: &Device, event: &Event) -> Result<(), Error> {
    let DeviceKind::Cuda(cuda) = &*device.0 else { return Ok(()) };
    cuda.enter()?;
    event.record(cuda.stream()).map_err(Error::driver("recording an event"))
}

/// Work that was recorded by [`Device::capture`].
pub struct Graph<'w> {
    // Before the device: it lives in its context.
    recorded: Option<Recorded>,
    work: Box<dyn FnMut() -> Result<(), Error> + 'w>,
    device: Device,
}

impl Graph<'_> {
    /// Enqueues it all on the queue that it was recorded from.
    ///
    /// # Errors
    /// A driver error; under the emulator, whatever the work fails with.
    pub fn launch(&mut self) -> Result<(), Error> {
        let (Some(recorded), DeviceKind::Cuda(cuda)) = (&self.recorded, &*self.device.0) else {
            let _recording = self.device.recording().begin()?;
            return (self.work)();
        };
        self.device.refuse_while_recording("the launch of a graph")?;
        cuda.enter()?;
        // SAFETY: the graph is ours; what it uses is borrowed by it, kept by its queue, or promised to live by who
        // enqueued it.
        check("launching a graph", unsafe { sys::cuGraphLaunch(recorded.0, cuda.stream().as_inner()) })
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // What the graph uses may be freed next.
        let _ = self.device.synchronize();
        if let (Some(recorded), DeviceKind::Cuda(cuda)) = (self.recorded.take(), &*self.device.0) {
            drop(recorded);
            cuda.let_go();
        }
    }
}

struct Recorded(sys::CUgraphExec);

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: made by `record`, destroyed once; its launches are over, as `Graph` waits for them.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

fn record(cuda: &Cuda, work: &mut dyn FnMut() -> Result<(), Error>) -> Result<Recorded, Error> {
    cuda.enter()?;
    let stream = cuda.stream().as_inner();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is ours and alive.
    check("recording a graph", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
    let worked = work();
    let mut graph = std::ptr::null_mut();
    // Ended whatever `work` said, or the queue would stay unusable.
    // SAFETY: `graph` is valid for a write, and the stream is being captured.
    let ended = check("recording a graph", unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
    let mut recorded = Recorded(std::ptr::null_mut());
    let made = worked.and(ended).and_then(|()| {
        // SAFETY: `recorded` is valid for a write, and the graph is complete.
        check("making a graph", unsafe { sys::cuGraphInstantiateWithFlags(&mut recorded.0, graph, 0) })
    });
    if !graph.is_null() {
        // SAFETY: made above, destroyed once; what was instantiated from it is a thing of its own.
        unsafe { sys::cuGraphDestroy(graph) };
    }
    match made {
        Ok(()) => Ok(recorded),
        Err(error) => {
            // Nothing was made that could be destroyed.
            std::mem::forget(recorded);
            Err(error)
        }
    }
}

//! Events, timers, and graphs: work that is recorded once and then launched as a whole.

use std::cell::Cell;
use std::time::Instant;

use cust::event::{Event, EventFlags, EventStatus};
use cust::stream::StreamWaitEventFlags;
use cust::sys;

use super::cuda::{Cuda, check};
use super::{Device, DeviceKind};
use crate::Error;

impl Device {
    /// A timer for work on this queue, which the device itself reads.
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

    /// Makes work that is enqueued on this queue from now on wait for all work enqueued so far on `other`, another
    /// queue of the same card.
    ///
    /// # Errors
    /// A driver error; [`Error::Recording`] while the work of either queue is recorded.
    pub fn wait_for(&self, other: &Device) -> Result<(), Error> {
        let doing = "a wait for another queue";
        let marker = other.marker()?;
        // A queue that waits for recorded work would be recorded with it.
        let recordable = other.refuse_while_recording(doing)?;
        marker.set()?;
        drop(recordable);
        let _enqueuing = self.refuse_while_recording(doing)?;
        let (DeviceKind::Cuda(here), Some(event)) = (&*self.0, marker.event) else { return Ok(()) };
        here.enter()?;
        here.stream()
            .wait_event(event, StreamWaitEventFlags::DEFAULT)
            .map_err(Error::driver("waiting for another queue"))
    }

    /// A marker for a point in this queue. It is not set yet.
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

    /// Records the work that `work` enqueues on this device, without running it. The result can be launched as a whole.
    ///
    /// `work` may launch kernels, clear and copy buffers, and copy to and from [`super::Pinned`] memory. Waiting,
    /// allocating and access to other host memory are refused. Launch its kernels once before: the first launch of a
    /// kernel may load it. The graph borrows what `work` borrows. Whatever memory of the card is dropped nevertheless
    /// after the recording has begun is freed only when no graph of the card is left. The emulator records nothing, and
    /// runs `work` at every launch of the graph.
    ///
    /// What `work` promises about [addresses](Self::launch) must hold for every launch of the graph.
    ///
    /// # Errors
    /// [`Error::Recording`] for something that cannot be recorded, any other error of `work`, or the driver's refusal
    /// of the recorded work.
    pub fn capture<'w>(&self, mut work: impl FnMut() -> Result<(), Error> + 'w) -> Result<Graph<'w>, Error> {
        let recorded = match &*self.0 {
            DeviceKind::Cuda(cuda) => {
                let _recording = cuda.recording().begin()?;
                cuda.recordings().add();
                Some(record(cuda, &mut work).inspect_err(|_| cuda.let_go())?)
            }
            DeviceKind::Emulator(_) => None,
        };
        Ok(Graph { recorded, work: Box::new(work), device: self.clone() })
    }
}

/// A point in a queue.
pub struct Marker {
    // Declared before the device, since it lives in the device's context. None under the emulator, where no work is
    // ever pending.
    event: Option<Event>,
    device: Device,
}

// SAFETY: an event is a handle that any thread may pass to the driver.
unsafe impl Send for Marker {}

impl Marker {
    /// Sets the marker behind everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    pub fn set(&self) -> Result<(), Error> {
        self.event.as_ref().map_or(Ok(()), |event| record_event(&self.device, event))
    }

    /// Waits until everything enqueued before the marker is done. Work enqueued since is not waited for. Returns at
    /// once if the marker was never set.
    ///
    /// # Errors
    /// The error of a kernel that failed.
    pub fn wait(&self) -> Result<(), Error> {
        let Some(event) = &self.event else { return Ok(()) };
        event.synchronize().map_err(Error::driver("running the kernels"))
    }

    /// Whether everything enqueued before the marker is done.
    ///
    /// # Errors
    /// The error of a kernel that failed.
    pub fn is_passed(&self) -> Result<bool, Error> {
        let Some(event) = &self.event else { return Ok(true) };
        event.query().map(|status| status == EventStatus::Ready).map_err(Error::driver("running the kernels"))
    }
}

/// Measures the device time between two points in a queue.
pub struct Timer {
    // Declared before the device: events live in the device's context.
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
    /// Starts the timer after everything enqueued so far.
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

    /// Stops the timer after everything enqueued so far.
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

    /// Milliseconds from start to stop. Waits until both points are reached.
    ///
    /// # Errors
    /// The timer was not started or not stopped, or the work in between failed.
    pub fn elapsed_ms(&self) -> Result<f64, Error> {
        match &self.clock {
            Clock::Events(start, stop) => {
                stop.synchronize().map_err(Error::driver("running the kernels"))?;
                stop.elapsed_time_f32(start).map(f64::from).map_err(Error::driver("reading the time"))
            }
            Clock::Host(start, stop) => Ok(stop.get().duration_since(start.get()).as_secs_f64() * 1e3),
        }
    }

    /// Milliseconds that the work which `work` enqueues takes. Waits for this work.
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

/// Records `event` behind everything enqueued on `device` so far.
fn record_event(device: &Device, event: &Event) -> Result<(), Error> {
    let DeviceKind::Cuda(cuda) = &*device.0 else { return Ok(()) };
    cuda.enter()?;
    event.record(cuda.stream()).map_err(Error::driver("recording an event"))
}

/// Work that [`Device::capture`] recorded.
pub struct Graph<'w> {
    // Declared before the device, since it lives in the device's context.
    recorded: Option<Recorded>,
    work: Box<dyn FnMut() -> Result<(), Error> + 'w>,
    device: Device,
}

impl Graph<'_> {
    /// Enqueues all of the work on the queue that it was recorded from.
    ///
    /// # Errors
    /// A driver error; under the emulator, also any error of the work.
    pub fn launch(&mut self) -> Result<(), Error> {
        let (Some(recorded), DeviceKind::Cuda(cuda)) = (&self.recorded, &*self.device.0) else {
            let _recording = self.device.recording().begin()?;
            return (self.work)();
        };
        let _enqueuing = self.device.refuse_while_recording("the launch of a graph")?;
        cuda.enter()?;
        // SAFETY: the graph is ours. The memory that it uses is borrowed by it, or kept for the card's recordings, or
        // was promised to live by whoever enqueued the work.
        check("launching a graph", unsafe { sys::cuGraphLaunch(recorded.0, cuda.stream().as_inner()) })
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // The memory that the graph uses may be freed after this; while a recording is under way, later.
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
        // SAFETY: made by `record`, destroyed once. The driver lets a launch that is under way come to its end.
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
    // The recording is ended even if `work` failed, or else the queue would stay unusable.
    // SAFETY: `graph` is valid for a write, and the stream is being captured.
    let ended = check("recording a graph", unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
    let mut recorded = Recorded(std::ptr::null_mut());
    let made = worked.and(ended).and_then(|()| {
        // SAFETY: `recorded` is valid for a write, and the graph is complete.
        check("making a graph", unsafe { sys::cuGraphInstantiateWithFlags(&mut recorded.0, graph, 0) })
    });
    if !graph.is_null() {
        // SAFETY: made above, destroyed once; the instance made from it does not depend on it.
        unsafe { sys::cuGraphDestroy(graph) };
    }
    match made {
        Ok(()) => Ok(recorded),
        Err(error) => {
            // No instance was made, so there is nothing to destroy.
            std::mem::forget(recorded);
            Err(error)
        }
    }
}

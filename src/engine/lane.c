/* SPDX-License-Identifier: MIT */
/*
 * A lane: one thread with one queue and one ring of staging memory. It takes requests from its
 * list, sends them through the queue, copies what landed on the job's stream, and lets go.
 * The loop below is the whole data path:
 *
 *   take -> ring_take -> queue_submit -> queue_reap -> land -> device_copy -> device_poll -> home
 *
 * (a write does the copy first). A lane that finds its way barred - no io_uring, no registration,
 * O_DIRECT refused after all - steps down to the next way and says so in the report.
 *
 * Invariants
 *   1. transits[i] belongs to ring.slots[i]; both are in use, or neither.
 *   2. A completion is failed, short or full, and all three are consumed in came_home().
 *   3. What is in flight is never abandoned: the thread ends only when all of its requests and
 *      copies are over.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/job.h"
#include "sys/os.h"
#include "sys/topology.h"

#define RETRIES_MAX 5
/* The longest a lane sleeps while only the store can bring news; bounds how late it sees a
 * cancellation. */
#define WAIT_STORE_NS 10000000ull
/* How often it looks while copies are on their way, or the device is coming up. */
#define WAIT_COPY_NS 40000ull
#define WAIT_COPY_MAX_NS 250000ull
#define WAIT_DEVICE_NS 200000ull
#define WAIT_IDLE_NS 500000ull
#define WAIT_START_NS 20000ull

static struct transit *transit_of(struct lane *lane, struct slot *slot)
{
	return &lane->transits[slot - lane->ring.slots];
}

static bool writes(const struct lane *lane)
{
	return lane->job->direction != PEN_READ;
}

static void fail(struct lane *lane, const struct pen_error *err)
{
	job_fail(lane->job, err);
}

/* ------------------------------------------------------------------------------ set-up -- */

static int open_queue(struct lane *lane, struct pen_error *err)
{
	struct queue_setup setup = {
		.device = lane->job->device,
		.depth = RING_SLOTS,
		.pieces = RING_PIECES,
		.transfer = lane->own_way.transfer,
		.inject = lane->job->options.inject,
		.injected = &lane->job->injected,
	};
	int rc = queue_init(&lane->queue, lane->own_way.queue, &setup, err);

	if (rc)
		return rc;
	lane->queue_up = true;
	lane->tally = job_tally(lane->job, lane->own_way.name, lane->own_way.reason);
	for (unsigned int i = 0; i < lane->ring.piece_count; i++)
		queue_attach(&lane->queue, i, lane->ring.pieces[i]->memory,
			     lane->ring.pieces[i]->size);
	return 0;
}

/* This lane needs staging memory from now on. */
static void start_staging(struct lane *lane)
{
	struct way *way = &lane->own_way;

	way->pieces_max = 2;
	if (way->size > lane->job->path->piece_size)
		way->size = (uint32_t)lane->job->path->piece_size;
}

/* The next way down from the one this lane uses; false where there is none. */
static bool next_way(struct lane *lane, const struct pen_error *why)
{
	struct way *way = &lane->own_way;
	/* Who asked for a way by name wants it, or the error. */
	bool auto_chosen = lane->job->options.transfer == PEN_AUTO;

	job_refused(lane->job, way->name, why);
	if (way->queue == &queue_uring_ops) {
		way->queue = &queue_sync_ops;
		text_copy(way->name, sizeof(way->name), "direct-threads");
	} else if (way->queue == &queue_map_ops && auto_chosen) {
		/* What it may no longer pin of the page cache it may take as staging memory. */
		atomic_fetch_add(&lane->job->budget.left,
				 (int)(2 * way->size / lane->job->path->piece_size));
		atomic_fetch_add(&lane->job->budget.kept, 1);
		start_staging(lane);
		way->queue = &queue_sync_ops;
		text_copy(way->name, sizeof(way->name), "cached");
	} else if (way->queue == &queue_cufile_ops && auto_chosen) {
		/* A piece was kept for it. */
		start_staging(lane);
		way->queue = &queue_uring_ops;
		way->direct = true;
		text_copy(way->name, sizeof(way->name), "direct-uring");
	} else if (way->queue == &queue_sync_ops && way->direct) {
		way->direct = false;
		text_copy(way->name, sizeof(way->name), "cached");
	} else {
		return false;
	}
	text_copy(way->reason, sizeof(way->reason), why->message);
	return true;
}

/* Leave this way for the next. Nothing may be queued. */
static int step_down(struct lane *lane, const struct pen_error *why)
{
	struct pen_error err = *why;

	do {
		if (lane->queue_up)
			queue_fini(&lane->queue);
		lane->queue_up = false;
		if (!next_way(lane, &err))
			return err.code;
	} while (open_queue(lane, &err));
	return 0;
}

static int add_piece(struct lane *lane, enum piece_need need)
{
	struct pen_error err;
	struct piece *piece;
	int rc;

	if (lane->ring.piece_count && lane->ring.piece_count >= lane->own_way.pieces_max)
		return -EAGAIN;
	piece = piece_take(&lane->job->budget, need, lane->job->device, &rc, &err);
	if (!piece) {
		/* Fewer pieces are slower, not wrong. No memory for the first is the end. */
		if (!rc || lane->ring.piece_count)
			return -EAGAIN;
		fail(lane, &err);
		return rc;
	}
	if (lane->queue_up)
		queue_attach(&lane->queue, lane->ring.piece_count, piece->memory, piece->size);
	ring_add(&lane->ring, piece);
	return 0;
}

/* Pin what is not pinned yet; pieces may have come since. False: later, see piece_pin(). */
static bool pin_pieces(struct lane *lane)
{
	struct pen_error err;

	for (; lane->pinned_pieces < lane->ring.piece_count; lane->pinned_pieces++) {
		struct piece *piece = lane->ring.pieces[lane->pinned_pieces];
		int rc = piece_pin(piece, &err);

		if (rc == -EAGAIN)
			return false;
		if (rc)
			job_refused(lane->job, "pinned staging", &err);
	}
	return true;
}

/* Waits for the copies that use this lane's memory. */
static void close_device(struct lane *lane)
{
	struct pen_device *device = lane->job->device;

	if (lane->ring.used)
		device_stream_drain(device, &lane->job->stream);
	job_stream_leave(lane->job);
	for (unsigned int i = 0; i < RING_SLOTS; i++)
		device_fence_close(device, &lane->transits[i].fence);
	lane->device_up = false;
}

static int open_device(struct lane *lane, struct pen_error *err)
{
	struct pen_device *device = lane->job->device;
	uint64_t none = 0;
	int rc = device_enter(device, err);

	if (!rc)
		rc = job_stream_join(lane->job, err);
	if (rc)
		return rc;
	for (unsigned int i = 0; i < RING_SLOTS && !rc; i++)
		rc = device_fence_open(device, &lane->transits[i].fence, err);
	if (!rc)
		rc = job_allocate(lane->job, err);
	if (rc) {
		close_device(lane);
		return rc;
	}
	lane->device_up = true;
	atomic_compare_exchange_strong(&lane->job->ready_ns, &none, os_now());
	return 0;
}

/* True once copies can be made. */
static bool device_usable(struct lane *lane)
{
	struct pen_error err;
	int rc = 0;

	/* A device that failed once is not asked again. */
	if (!job_running(lane->job))
		return false;
	if (!lane->device_up) {
		rc = device_poll_ready(lane->job->device, &err);
		if (rc == -EAGAIN)
			return false;
		if (!rc)
			rc = open_device(lane, &err);
	}
	if (rc) {
		fail(lane, &err);
		return false;
	}
	return pin_pieces(lane);
}

/* ------------------------------------------------------------------------ taking work -- */

/* How much may be asked for in one request now. */
static uint64_t size_now(struct lane *lane)
{
	struct pen_job *job = lane->job;
	const struct way *way = &lane->own_way;
	uint64_t size = way->tuned ? tuner_get(&job->tuner).size : way->size;
	uint64_t left = atomic_load_explicit(&job->bytes_left[way->list], memory_order_relaxed);
	uint64_t fair = left / (job->lane_count * 2);

	if (size > way->size)
		size = way->size;
	/* Towards the end smaller bites, so that no lane is left alone with a large one. */
	return fair < size && !lane->job->options.request_size ? fair : size;
}

/* How many requests this lane may have with the store now. */
static unsigned int depth_now(struct lane *lane)
{
	const struct way *way = &lane->own_way;
	unsigned int depth, peers = lane->peers;

	if (lane->job->path->one_at_a_time)
		return 1;
	if (!way->tuned)
		return lane->queue.inner->lends ? 2 : lane->queue.inner->placed ? 16 : RING_SLOTS;
	depth = tuner_get(&lane->job->tuner).depth;
	depth = depth / peers + (lane->index < depth % peers);
	/* Who has something under way must be able to finish it. */
	return depth || (!lane->ring.used && !lane->held_count) ? depth : 1;
}

static bool follows(const struct plan *plan, uint32_t last, uint32_t next)
{
	const struct plan_request *a = &plan->requests[last], *b = &plan->requests[next];

	return next == last + 1 && a->object == b->object && a->offset + a->length == b->offset &&
	       a->edge == b->edge;
}

/* Is the request one stretch of memory, no more and no less? */
static bool one_stretch(const struct plan *plan, uint32_t index)
{
	const struct plan_request *request = &plan->requests[index];
	const struct plan_copy *copy = &plan->copies[request->first_copy];

	return request->copy_count == 1 && copy->rows == 1 && copy->width == request->length;
}

/* Does the stretch go on in memory from one request to the next? */
static bool stretches_on(const struct plan *plan, uint32_t last, uint32_t next)
{
	const struct plan_copy *a = &plan->copies[plan->requests[last].first_copy];

	const struct plan_copy *b = &plan->copies[plan->requests[next].first_copy];

	return one_stretch(plan, last) && one_stretch(plan, next) &&
	       b->memory == a->memory + a->width && b->allocation == a->allocation;
}

/* May `next` join a larger request that ends with `last`? */
static bool joins(const struct lane *lane, uint32_t last, uint32_t next)
{
	const struct plan *plan = lane->job->path->plan;
	bool straight = lane->queue.inner->placed || lane->job->device->is_host;

	/* What can go straight to its memory does, rather than being staged in company. */
	return follows(plan, last, next) &&
	       (!straight || !one_stretch(plan, last) || stretches_on(plan, last, next));
}

/* Bytes of staging memory that the requests from `first` to `last` need together: a direct read
 * is widened to whole blocks at both ends. */
static uint64_t span(const struct lane *lane, uint32_t first, uint32_t last)
{
	const struct plan *plan = lane->job->path->plan;
	const struct plan_request *a = &plan->requests[first], *b = &plan->requests[last];
	uint64_t align = plan->objects[a->object]->info.offset_align;

	if (!lane->own_way.direct || !align)
		align = 1;
	return (b->offset + b->length + align - 1) / align * align - a->offset / align * align;
}

/* Take the next request of the list and its neighbours, up to `limit` bytes. */
static bool take(struct lane *lane, uint64_t limit, struct range *range)
{
	struct pen_job *job = lane->job;
	const struct work *work = &job->path->work[lane->own_way.list];
	const struct plan_request *requests = job->path->plan->requests;
	_Atomic size_t *cursor = &job->next[lane->own_way.list];
	size_t at = atomic_load_explicit(cursor, memory_order_relaxed);
	uint64_t bytes;

	do {
		if (at >= work->count)
			return false;
		range->first = work->requests[at];
		range->count = 1;
		bytes = requests[range->first].length;
		while (at + range->count < work->count) {
			uint32_t next = work->requests[at + range->count];

			if (next != range->first + range->count || !joins(lane, next - 1, next) ||
			    span(lane, range->first, next) > limit)
				break;
			bytes += requests[next].length;
			range->count++;
		}
	} while (!atomic_compare_exchange_weak_explicit(cursor, &at, at + range->count,
							memory_order_relaxed,
							memory_order_relaxed));
	atomic_fetch_sub_explicit(&job->bytes_left[lane->own_way.list], bytes,
				  memory_order_relaxed);
	return true;
}

/* What was taken and could not be sent: it goes first when there is room, or another way. */
static void hold(struct lane *lane, struct range range)
{
	assert(lane->held_count < 2 * RING_SLOTS);
	lane->held[lane->held_count++] = range;
}

/* The next range to carry: held ones first, cut to `limit`. */
static bool next_range(struct lane *lane, uint64_t limit, struct range *range)
{
	struct range *held;

	if (!lane->held_count)
		return take(lane, limit, range);
	held = &lane->held[lane->held_count - 1];
	*range = (struct range){ held->first, 1 };
	while (range->count < held->count &&
	       span(lane, held->first, held->first + range->count) <= limit &&
	       joins(lane, held->first + range->count - 1, held->first + range->count))
		range->count++;
	held->first += range->count;
	held->count -= range->count;
	if (!held->count)
		lane->held_count--;
	return true;
}

static bool work_left(struct lane *lane)
{
	return lane->held_count ||
	       atomic_load_explicit(&lane->job->next[lane->own_way.list], memory_order_relaxed) <
		       lane->job->path->work[lane->own_way.list].count;
}

/* ---------------------------------------------------------------------------- copying -- */

/* Queue the copies of a transit, neighbours merged into one where both sides go on. */
static int start_copies(struct lane *lane, struct transit *transit, struct pen_error *err)
{
	const struct plan *plan = lane->job->path->plan;
	struct pen_device *device = lane->job->device;
	struct device_stream *stream = &lane->job->stream;
	intptr_t shift = atomic_load_explicit(&lane->job->shift, memory_order_relaxed);
	struct device_copy pending = { .rows = 0 };
	uint64_t allocation = 0;
	int rc;

	for (uint32_t i = transit->first; i < transit->first + transit->count; i++) {
		const struct plan_request *request = &plan->requests[i];
		unsigned char *base =
			transit->buffer + transit->lead + (request->offset - transit->offset);

		for (uint32_t c = 0; c < request->copy_count; c++) {
			const struct plan_copy *copy = &plan->copies[request->first_copy + c];

			if (pending.rows == 1 && copy->rows == 1 &&
			    allocation == copy->allocation &&
			    pending.memory + pending.width == copy->memory + shift &&
			    pending.host + pending.width == base + copy->at) {
				pending.width += copy->width;
				continue;
			}
			if (pending.rows) {
				rc = device_copy(device, stream, &pending, err);
				if (rc)
					return rc;
			}
			pending = (struct device_copy){
				.memory = copy->memory + shift,
				.host = base + copy->at,
				.width = copy->width,
				.rows = copy->rows,
				.memory_pitch = copy->memory_pitch,
				.host_pitch = copy->at_pitch,
				.to_device = !writes(lane),
			};
			allocation = copy->allocation;
		}
	}
	rc = device_copy(device, stream, &pending, err);
	if (!rc)
		rc = device_mark(device, stream, &transit->fence, err);
	return rc;
}

static uint64_t useful_bytes(const struct plan *plan, uint32_t first, uint32_t count)
{
	uint64_t bytes = 0;

	for (uint32_t i = first; i < first + count; i++) {
		const struct plan_request *request = &plan->requests[i];

		for (uint32_t c = 0; c < request->copy_count; c++) {
			const struct plan_copy *copy = &plan->copies[request->first_copy + c];

			bytes += copy->width * copy->rows;
		}
	}
	return bytes;
}

/* ------------------------------------------------------------------ one request's life -- */

/* The kernel and the GPU have let go of a transit's memory. */
static void let_go(struct lane *lane, struct transit *transit)
{
	queue_release(&lane->queue, &transit->io);
	if (lane->queue.inner->lends)
		budget_count(&lane->job->budget, -(int64_t)transit->length);
	transit->state = TRANSIT_NONE;
	ring_put(&lane->ring, transit->slot);
}

static void home(struct lane *lane, struct transit *transit)
{
	struct tally *tally = lane->tally;

	if (transit->io.write && !transit->io.direct && lane->own_way.direct) {
		if (!lane->edge_tally)
			lane->edge_tally = job_tally(lane->job, "cached",
						     "edges that O_DIRECT cannot write");
		tally = lane->edge_tally;
	}
	atomic_fetch_add_explicit(&tally->bytes, transit->bytes, memory_order_relaxed);
	atomic_fetch_add_explicit(&lane->bytes, transit->bytes, memory_order_relaxed);
	lane->requests++;
	groups_came(&lane->job->arrived, transit->first, transit->count);
	let_go(lane, transit);
}

/* All bytes of a write are in the slot: their memory may change again. */
static void gathered(struct lane *lane, struct transit *transit)
{
	groups_came(&lane->job->gathered, transit->first, transit->count);
	transit->state = COPIED;
}

static void submit(struct lane *lane, struct transit *transit)
{
	int rc = queue_submit(&lane->queue, &transit->io);

	if (rc) {
		/* A library without room for one more file; it will have when others are home. */
		transit->state = COPIED;
		return;
	}
	if (!transit->io.attempt)
		transit->born_ns = transit->io.started_ns;
	transit->state = QUEUED;
	transit->slot->state = SLOT_FILLING;
}

static void io_error(struct transit *transit, struct pen_error *err)
{
	struct queue_request *io = &transit->io;
	const char *operation = io->write ? "write" : "read";

	if (io->error.code) {
		*err = io->error;
		if (err->offset < 0)
			err->offset = (int64_t)io->offset;
		if (!err->object[0])
			text_copy_end(err->object, sizeof(err->object), io->object->name);
		return;
	}
	error_sys(err, io->result, operation, io->object->name, (int64_t)io->offset);
	switch (io->result) {
	case -EIO:
	case -EREMOTEIO:
		error_hint(err, "The store reports damage; look into the kernel log");
		break;
	case -EINVAL:
		if (io->direct)
			error_hint(err, "O_DIRECT was used with %zu bytes at %llu; the store may "
					"want another alignment", io->room,
				   (unsigned long long)io->offset);
		break;
	case -ENOSPC:
	case -EDQUOT:
		error_hint(err, io->object->mode == PEN_WRITE
					? "Free some space; the target was left as it was"
					: "Free some space; part of the target is overwritten");
		break;
	case -ENOMEM:
		error_hint(err, "Raise the limit of locked memory (ulimit -l) or lower the memory "
				"limit");
		break;
	}
}

static bool transient(int result)
{
	return result == -EINTR || result == -EAGAIN || result == -EIO || result == -EBUSY;
}

/* Send what is still missing of a request that came home short. */
static void send_rest(struct lane *lane, struct transit *transit)
{
	struct queue_request *io = &transit->io;
	uint32_t align = io->direct ? io->object->info.offset_align : 1;
	size_t skip = io->done / align * align;

	if (lane->queue.inner->lends) {
		/* The whole range again: a second mapping would leave the first one behind. */
		queue_release(&lane->queue, io);
		skip = 0;
	} else if (!skip && io->direct) {
		/* Not even one block: the rest goes through the page cache. */
		io->direct = false;
		skip = io->done;
		io->room = io->length;
	}
	io->offset += skip;
	io->buffer += skip;
	io->length -= skip;
	io->room -= skip;
	io->attempt++;
	submit(lane, transit);
}

/* The bytes are here: copy them on, or be done. */
static void land(struct lane *lane, struct transit *transit)
{
	if (transit->placed || transit->io.write) {
		home(lane, transit);
		return;
	}
	if (lane->queue.inner->lends)
		transit->buffer = transit->io.buffer;
	transit->state = LANDED;
}

/* Is this failure the way's, so that another way can carry the request? */
static bool way_barred(struct lane *lane, const struct queue_request *io)
{
	int result = io->result;

	/* What auto chose by itself it also leaves by itself. */
	if (lane->own_way.queue == &queue_cufile_ops)
		return lane->job->options.transfer == PEN_AUTO;
	/* Mapping or registering was refused; a failing store is no reason to go another way. */
	if (lane->queue.inner->lends)
		return io->error.domain == PEN_DOMAIN_CUDA || result == -ENODEV ||
		       result == -EACCES || result == -EPERM || result == -ENOMEM ||
		       result == -ENOTSUP || result == -EINVAL;
	return io->direct && (result == -EINVAL || result == -EOPNOTSUPP);
}

/* A request failed: try again, leave this way, or give up. */
static void failed(struct lane *lane, struct transit *transit)
{
	struct queue_request *io = &transit->io;
	struct range range = { transit->first, transit->count };
	struct pen_error err;

	io_error(transit, &err);
	if (!job_running(lane->job)) {
		let_go(lane, transit);
	} else if (transient(io->result) && transit->retries < RETRIES_MAX) {
		/* Give a store that stumbles a moment, longer each time. */
		os_sleep((uint64_t)100000 << transit->retries++);
		lane->retries++;
		io->attempt++;
		submit(lane, transit);
	} else if (way_barred(lane, io)) {
		if (!lane->leaving)
			lane->why_leaving = err;
		lane->leaving = true;
		hold(lane, range);
		let_go(lane, transit);
	} else {
		fail(lane, &err);
		let_go(lane, transit);
	}
}

/* A request moved less than it should: send the rest, unless there is none. */
static void fell_short(struct lane *lane, struct transit *transit)
{
	struct queue_request *io = &transit->io;
	struct pen_error err;

	if (!io->done && !io->write) {
		error_set(&err, -ESTALE, "read", io->object->name, (int64_t)io->offset,
			  "it ends here, %zu bytes early: it shrank while it was read", io->length);
		error_hint(&err, "Read it again when nothing writes to it");
		fail(lane, &err);
	} else if ((!io->done || lane->queue.inner->lends) && transit->retries++ >= RETRIES_MAX) {
		error_set(&err, -EIO, io->write ? "write" : "read", io->object->name,
			  (int64_t)io->offset, "request after request comes up short");
		fail(lane, &err);
	}
	if (!job_running(lane->job)) {
		let_go(lane, transit);
		return;
	}
	lane->retries++;
	send_rest(lane, transit);
}

/* A request is back: failed, short or full. */
static void came_home(struct lane *lane, struct transit *transit)
{
	struct queue_request *io = &transit->io;

	if (io->result < 0) {
		failed(lane, transit);
		return;
	}
	lane->storage_bytes += io->done;
	if (io->done < io->length) {
		fell_short(lane, transit);
		return;
	}
	hist_add(&lane->latency, io->ended_ns - transit->born_ns);
	if (lane->own_way.tuned)
		tuner_add(&lane->job->tuner, transit->length, io->ended_ns);
	land(lane, transit);
}

/* --------------------------------------------------------------------------- the loop -- */

/* Where the bytes can go straight between the store and their memory; NULL: they are staged. */
static unsigned char *placement(struct lane *lane, const struct transit *transit)
{
	const struct plan *plan = lane->job->path->plan;
	const struct plan_request *head = &plan->requests[transit->first];
	const struct object_info *info = &plan->objects[head->object]->info;
	unsigned char *memory = plan->copies[head->first_copy].memory +
				atomic_load_explicit(&lane->job->shift, memory_order_relaxed);

	if (lane->queue.inner->placed)
		return memory;
	/* Who asks when memory may change again wants it soon, not when the store has it. */
	if (!lane->job->device->is_host || !one_stretch(plan, transit->first) ||
	    lane->job->gathered.count)
		return NULL;
	for (uint32_t i = transit->first + 1; i < transit->first + transit->count; i++)
		if (!stretches_on(plan, i - 1, i))
			return NULL;
	if (lane->own_way.direct && !head->edge &&
	    ((uintptr_t)memory % info->memory_align || transit->offset % info->offset_align ||
	     transit->length % info->offset_align))
		return NULL;
	return memory;
}

/* Fill in what the queue needs to know; everything but the buffer. */
static void prepare(struct lane *lane, struct transit *transit, struct range range)
{
	const struct plan *plan = lane->job->path->plan;
	const struct plan_request *head = &plan->requests[range.first];
	const struct plan_request *last = &plan->requests[range.first + range.count - 1];
	struct pen_object *object = plan->objects[head->object];
	uint32_t align = object->info.offset_align;
	struct queue_request *io = &transit->io;

	transit->first = range.first;
	transit->count = range.count;
	transit->offset = head->offset;
	transit->length = last->offset + last->length - head->offset;
	transit->bytes = useful_bytes(plan, range.first, range.count);
	transit->retries = 0;
	memset(io, 0, sizeof(*io));
	io->object = object;
	io->write = writes(lane);
	io->direct = lane->own_way.direct && !head->edge && align;
	io->buffer_index = -1;
	transit->lead = io->direct ? transit->offset % align : 0;
	io->offset = transit->offset - transit->lead;
	io->length = (size_t)(transit->lead + transit->length);
	io->room = io->length;
	if (io->direct && !io->write)
		io->room = (io->length + align - 1) / align * align;
}

/* A slot of the ring with `size` bytes of staging memory, growing the ring where that helps. */
static struct slot *find_slot(struct lane *lane, size_t size)
{
	struct slot *slot = ring_take(&lane->ring, size, SLOT_FILLING);

	if (!slot && size && ring_can_grow(&lane->ring) &&
	    !add_piece(lane, lane->ring.piece_count ? PIECE_MORE : PIECE_FIRST))
		slot = ring_take(&lane->ring, size, SLOT_FILLING);
	return slot;
}

/* Take one more range and send it on its way; false where there is none, or no room. */
static bool issue(struct lane *lane)
{
	struct transit ready = { .state = TRANSIT_NONE }, *transit;
	unsigned char *memory;
	struct range range;
	struct slot *slot;

	if (lane->leaving || lane->ring.used == RING_SLOTS ||
	    !next_range(lane, size_now(lane), &range))
		return false;
	prepare(lane, &ready, range);
	memory = placement(lane, &ready);
	slot = find_slot(lane, memory || lane->queue.inner->lends ? 0 : ready.io.room);
	if (!slot) {
		hold(lane, range);
		return false;
	}
	transit = transit_of(lane, slot);
	ready.fence = transit->fence;
	*transit = ready;
	transit->slot = slot;
	transit->placed = memory != NULL;
	transit->buffer = transit->io.buffer = memory ? memory : slot->memory;
	if (slot->memory)
		transit->io.buffer_index = (int)slot->piece;
	transit->io.serial =
		atomic_fetch_add_explicit(&lane->job->serial, 1, memory_order_relaxed) + 1;
	if (lane->queue.inner->lends)
		budget_count(&lane->job->budget, (int64_t)transit->length);
	if (!writes(lane))
		submit(lane, transit);
	else
		transit->state = memory ? COPIED : LANDED;
	return true;
}

/* Move every transit on by what is possible now. Returns whether anything moved. */
static bool advance(struct lane *lane)
{
	struct pen_device *device = lane->job->device;
	unsigned int left = lane->ring.used;
	bool moved = false;

	for (unsigned int i = 0; left; i++) {
		struct transit *transit = &lane->transits[i];
		struct pen_error err;
		int rc;

		left -= transit->state != TRANSIT_NONE;
		switch (transit->state) {
		case LANDED:
			if (!device_usable(lane))
				break;
			rc = start_copies(lane, transit, &err);
			/* Even a copy that failed half-way may have queued others before. */
			transit->state = COPYING;
			transit->slot->state = SLOT_COPYING;
			moved = true;
			if (rc) {
				fail(lane, &err);
				return moved;
			}
			break;
		case COPYING:
			rc = device_poll(device, &transit->fence, &err);
			if (rc == -EAGAIN)
				break;
			moved = true;
			if (rc) {
				fail(lane, &err);
				return moved;
			}
			if (writes(lane))
				gathered(lane, transit);
			else
				home(lane, transit);
			break;
		case COPIED:
			if (lane->queue.queued >= depth_now(lane))
				break;
			submit(lane, transit);
			moved = true;
			break;
		default:
			break;
		}
	}
	return moved;
}

static bool reap(struct lane *lane, uint64_t wait_ns)
{
	struct queue_request *done[16];
	unsigned int count = queue_reap(&lane->queue, done, 16, wait_ns);

	for (unsigned int i = 0; i < count; i++) {
		struct transit *transit =
			(struct transit *)((char *)done[i] - offsetof(struct transit, io));

		came_home(lane, transit);
	}
	return count;
}

/* Requests with the store, for the depth: of a write, those being gathered do not count. */
static bool may_issue(struct lane *lane)
{
	unsigned int depth = depth_now(lane);

	if (lane->job->path->one_at_a_time)
		return !lane->ring.used;
	/* A lent buffer is pinned until its copy is through, so what is being copied counts. */
	if (lane->queue.inner->lends)
		return lane->ring.used < depth;
	/* A write fills slots ahead of the store by as many again. */
	return writes(lane) ? lane->ring.used < 2 * depth : lane->queue.queued < depth;
}

/* Nothing moved: sleep where news will come from. A copy tells nobody when it is through, and each
 * look costs the CPU a few microseconds: so the first nap is half of what the last wait took. */
static void wait_for_news(struct lane *lane)
{
	bool copying = lane->ring.used > lane->queue.queued;

	if (lane->queue.queued) {
		reap(lane, copying ? WAIT_COPY_NS : WAIT_STORE_NS);
	} else if (lane->ring.used && lane->device_up) {
		uint64_t nap = lane->waited_ns ? WAIT_COPY_NS : lane->last_wait_ns / 2;

		nap = nap > WAIT_COPY_MAX_NS ? WAIT_COPY_MAX_NS : nap;
		nap = nap < WAIT_COPY_NS ? WAIT_COPY_NS : nap;
		lane->waited_ns += nap;
		os_sleep(nap);
	} else {
		os_sleep(lane->ring.used ? WAIT_DEVICE_NS : WAIT_IDLE_NS);
	}
}

/* Nothing is under way any more: change to the next way down. */
static bool leave(struct lane *lane)
{
	lane->leaving = false;
	if (!step_down(lane, &lane->why_leaving))
		return true;
	fail(lane, &lane->why_leaving);
	return false;
}

static void carry(struct lane *lane)
{
	while (job_running(lane->job)) {
		bool moved = false;

		while (may_issue(lane) && issue(lane)) {
			moved = true;
			/* A synchronous queue has the result already; keep the copies flowing. */
			if (reap(lane, 0))
				break;
		}
		moved |= reap(lane, 0);
		moved |= advance(lane);
		if (lane->leaving && !lane->ring.used && !leave(lane))
			return;
		if (moved) {
			lane->last_wait_ns = lane->waited_ns;
			lane->waited_ns = 0;
			continue;
		}
		if (!lane->ring.used && !work_left(lane))
			return;
		wait_for_news(lane);
	}
}

/* Bring home all that is in flight, whatever happened. */
static void drain(struct lane *lane)
{
	while (lane->queue.queued)
		reap(lane, WAIT_STORE_NS);
	/* After this no copy reads or writes a slot any more. */
	if (lane->device_up)
		close_device(lane);
	for (unsigned int i = 0; i < RING_SLOTS; i++)
		if (lane->transits[i].state != TRANSIT_NONE)
			let_go(lane, &lane->transits[i]);
	assert(!lane->ring.used);
}

/* What the caller's stream holds comes first, also for bytes that pass our own stream by. */
static int wait_for_caller(struct lane *lane, struct pen_error *err)
{
	int rc;

	while ((rc = device_poll(lane->job->device, &lane->job->after, err)) == -EAGAIN) {
		if (!job_running(lane->job))
			return 0;
		os_sleep(WAIT_COPY_NS);
	}
	return rc;
}

static bool wait_for_device(struct lane *lane)
{
	struct pen_error err;

	while (job_running(lane->job) && !device_usable(lane))
		os_sleep(WAIT_DEVICE_NS);
	if (!job_running(lane->job))
		return false;
	if (!lane->own_way.queue->placed || !lane->job->options.stream)
		return true;
	if (!wait_for_caller(lane, &err))
		return job_running(lane->job);
	fail(lane, &err);
	return false;
}

/* Everything a lane needs before its first request. */
static bool set_up(struct lane *lane)
{
	const struct queue_ops *queue = lane->own_way.queue;
	struct pen_error err;
	int rc;

	/* Thread and memory belong on the device's node; with several, wait to know which. */
	while (device_node(lane->job->device) == NODE_PENDING && job_running(lane->job))
		os_sleep(WAIT_DEVICE_NS);
	topology_bind_thread(device_node(lane->job->device));

	/* These hand memory to the GPU themselves. */
	if ((queue->placed || queue->lends) && !wait_for_device(lane))
		return false;
	rc = open_queue(lane, &err);
	if (rc)
		rc = step_down(lane, &err);
	if (rc) {
		fail(lane, &err);
		return false;
	}
	while (job_running(lane->job) && lane->ring.piece_count < lane->own_way.pieces_first && !rc)
		rc = add_piece(lane, PIECE_TOGETHER);
	return true;
}

static void tear_down(struct lane *lane)
{
	if (lane->queue_up) {
		drain(lane);
		queue_fini(&lane->queue);
	}
	/* A lane that never had a queue may have a device. */
	if (lane->device_up)
		close_device(lane);
	/* Pieces go back at once: lanes still at work may grow into them. */
	while (lane->ring.piece_count)
		piece_put(&lane->job->budget, lane->ring.pieces[--lane->ring.piece_count]);
}

void *lane_run(void *argument)
{
	struct lane *lane = argument;

	os_precise_sleep();
	/* Who wakes up is given an idle core. A new thread may have to share one for milliseconds
	 * with a lane that is at work already, so nobody works before all are there. */
	while (!atomic_load(&lane->job->started))
		os_sleep(WAIT_START_NS);
	lane->own_way = *lane->way;
	if (set_up(lane))
		carry(lane);
	tear_down(lane);
	lane->cpu_ns = os_thread_cpu();
	job_lane_ended(lane->job);
	return NULL;
}

/* SPDX-License-Identifier: MIT */
/*
 * The thread of a lane; see lane.h for the life of what it carries. carry() is the whole data path.
 * A lane that finds its path barred - no io_uring, no registration, O_DIRECT refused after all -
 * finishes what is under way, steps down to the next path of the table and says so in the report.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/job.h"
#include "engine/lane.h"
#include "sys/os.h"
#include "sys/topology.h"

/* The longest a lane sleeps while only the store can bring news; bounds how late it sees a
 * cancellation. */
#define WAIT_STORE_NS 10000000ull
/* How often it looks while copies are on their way, or the device is coming up. */
#define WAIT_COPY_NS 40000ull
#define WAIT_COPY_MAX_NS 250000ull
#define WAIT_DEVICE_NS 200000ull
#define WAIT_IDLE_NS 500000ull
#define WAIT_START_NS 20000ull

bool lane_writes(const struct lane *lane)
{
	return lane->job->direction != PEN_READ;
}

void lane_fail(struct lane *lane, const struct pen_error *err)
{
	job_fail(lane->job, err);
}

int lane_init(struct lane *lane, struct pen_job *job, const struct path *path, unsigned int index)
{
	const struct schedule *schedule = job->schedule;
	lane->job = job;
	lane->planned = path;
	lane->index = index;
	lane->peers = path->lanes;
	lane->stream = schedule->plan->formed_bytes ? index % JOB_STREAMS : 0;
	lane->entered = -1;
	lane->transits = os_calloc(schedule->slots, sizeof(lane->transits[0]));
	lane->held = os_calloc(2 * (size_t)schedule->slots, sizeof(lane->held[0]));
	lane->fences = os_calloc(LANE_COPIES, sizeof(lane->fences[0]));
	if (!lane->transits || !lane->held || !lane->fences)
		return -ENOMEM;
	/* A piece holds a slot, or it is of no use. */
	return staging_init(&lane->staging, schedule->slots, schedule->slots);
}

void lane_fini(struct lane *lane)
{
	struct piece *piece;

	while ((piece = staging_remove(&lane->staging)) != NULL)
		piece_put(&lane->job->budget, piece);
	staging_fini(&lane->staging);
	if (lane->part)
		budget_count(&lane->job->budget, -(int64_t)schedule_part(lane->job->schedule));
	free(lane->transits);
	free(lane->held);
	free(lane->part);
	free(lane->fences);
}

/* ------------------------------------------------------------------------------- set-up -- */

static void attach_piece(struct lane *lane, unsigned int index)
{
	struct piece *piece = lane->staging.pieces[index].piece;

	/* What a queue on the device attaches is the device's. */
	if (index < lane->queue.setup.pieces && !lane->queue.inner->on_device)
		queue_attach(&lane->queue, index, piece->memory, piece->size);
}

static int open_queue(struct lane *lane, struct pen_error *err)
{
	struct pen_job *job = lane->job;
	struct queue_setup setup = {
		.device = job->schedule->gpu ? job->schedule->gpu : job->device,
		.depth = LANE_DEPTH,
		/* Of what is gathered far ahead each piece is sent once or twice: making it known
		 * would take longer than it saves. */
		.pieces = job->schedule->ahead ? 0 : lane->staging.piece_room,
		.transfer = lane->path.transfer,
		.inject = job->options.inject,
		.injected = &job->injected,
	};
	int rc = queue_init(&lane->queue, lane->path.kind->queue, &setup, err);

	if (rc)
		return rc;
	lane->queue_up = true;
	lane->tally = job_tally(job, lane->path.kind->name, lane->path.reason);
	for (unsigned int i = 0; i < lane->staging.piece_count; i++)
		attach_piece(lane, i);
	return 0;
}

/* This lane needs staging memory from now on. */
static void start_staging(struct lane *lane)
{
	size_t piece = lane->job->schedule->piece_size;

	lane->path.pieces_max = 2;
	if (lane->path.size > piece)
		lane->path.size = (uint32_t)piece;
}

/* The next path down from the one this lane uses; false where there is none. */
static bool next_path(struct lane *lane, const struct pen_error *why)
{
	const struct path_kind *kind = lane->path.kind;
	struct pen_job *job = lane->job;

	job_refused(job, kind->name, why);
	/* Who asked for a path by name wants it, or the error. */
	if (kind->down == PATH_NONE ||
	    (kind->down_unasked && job->options.transfer != PEN_AUTO))
		return false;
	if (kind->queue->lends) {
		/* What it may no longer pin of the page cache it may take as staging memory. */
		size_t share = 2 * (size_t)lane->path.size - schedule_part(job->schedule);

		atomic_fetch_add(&job->budget.left, (int)(share / job->schedule->piece_size));
		atomic_fetch_add(&job->budget.kept, 1);
	}
	/* For lanes of GDS a piece was kept. */
	if (kind->queue->lends || kind->queue->on_device)
		start_staging(lane);
	lane->path.kind = &path_kinds[kind->down];
	text_copy(lane->path.reason, sizeof(lane->path.reason), why->message);
	return true;
}

/* Leave this path for the next. Nothing may be queued. `why` becomes why the last one failed. */
static int step_down(struct lane *lane, struct pen_error *why)
{
	do {
		if (lane->queue_up)
			queue_fini(&lane->queue);
		lane->queue_up = false;
		if (!next_path(lane, why))
			return why->code;
	} while (open_queue(lane, why));
	return 0;
}

int lane_add_piece(struct lane *lane, enum piece_need need)
{
	struct schedule *schedule = lane->job->schedule;
	struct pen_device *device = schedule->gpu ? schedule->gpu : lane->job->device;
	struct staging *staging = &lane->staging;
	struct pen_error err;
	struct piece *piece;
	int rc;

	if (staging->piece_count && staging->piece_count >= lane->path.pieces_max)
		return -EAGAIN;
	piece = piece_take(&lane->job->budget, need, device, &rc, &err);
	if (!piece) {
		/* Fewer pieces are slower, not wrong. No memory for the first is the end. */
		if (!rc || staging->piece_count)
			return -EAGAIN;
		lane_fail(lane, &err);
		return rc;
	}
	staging_add(staging, piece);
	if (lane->queue_up)
		attach_piece(lane, staging->piece_count - 1);
	return 0;
}

/* ------------------------------------------------------------------------------ devices -- */

struct device_stream *lane_stream(struct lane *lane, unsigned int device)
{
	return &lane->job->devices[device].streams[lane->stream].stream;
}

int lane_enter(struct lane *lane, unsigned int device, struct pen_error *err)
{
	int rc;

	if (lane->entered == (int)device)
		return 0;
	rc = device_enter(lane->job->devices[device].device, err);
	lane->entered = rc ? -1 : (int)device;
	return rc;
}

/* Pin what is not pinned yet; pieces may have come since. False: later, see piece_pin(). */
static bool pin_pieces(struct lane *lane)
{
	struct pen_error err;

	if (lane->pinned_pieces < lane->staging.piece_count &&
	    lane_enter(lane, lane->job->staging_device, &err)) {
		lane_fail(lane, &err);
		return false;
	}
	for (; lane->pinned_pieces < lane->staging.piece_count; lane->pinned_pieces++) {
		int rc = piece_pin(lane->staging.pieces[lane->pinned_pieces].piece, &err);

		if (rc == -EAGAIN)
			return false;
		if (rc)
			job_refused(lane->job, "pinned staging", &err);
	}
	return true;
}

/* Waits for the copies that use this lane's memory. */
static void close_device(struct lane *lane, unsigned int index)
{
	struct job_device *device = &lane->job->devices[index];

	lane_enter(lane, index, NULL);
	if (lane->staging.used)
		device_stream_drain(device->device, lane_stream(lane, index));
	job_stream_leave(lane->job, index, lane->stream);
	for (unsigned int i = 0; i < LANE_COPIES; i++)
		device_fence_close(device->device, &lane->fences[i][index]);
	lane->devices_up &= ~(1u << index);
}

static void close_devices(struct lane *lane)
{
	while (lane->devices_up)
		close_device(lane, (unsigned int)__builtin_ctz(lane->devices_up));
}

static int open_device(struct lane *lane, unsigned int index, struct pen_error *err)
{
	struct job_device *device = &lane->job->devices[index];
	uint64_t none = 0;
	int rc = lane_enter(lane, index, err);

	if (!rc)
		rc = job_stream_join(lane->job, index, lane->stream, err);
	if (rc)
		return rc;
	lane->devices_up |= 1u << index;
	for (unsigned int i = 0; i < LANE_COPIES && !rc; i++)
		rc = device_fence_open(device->device, &lane->fences[i][index], err);
	if (!rc)
		rc = job_allocate(lane->job, index, err);
	if (rc)
		close_device(lane, index);
	else
		atomic_compare_exchange_strong(&lane->job->ready_ns, &none, os_now());
	return rc;
}

/* 0 once the device is up for this lane, -EAGAIN not yet. */
static int bring_up(struct lane *lane, unsigned int index, struct pen_error *err)
{
	int rc = 0;

	if (lane->devices_up >> index & 1)
		return 0;
	rc = device_poll_ready(lane->job->devices[index].device, err);
	return rc ? rc : open_device(lane, index, err);
}

bool lane_devices_usable(struct lane *lane, uint32_t devices)
{
	struct pen_error err;

	/* A device that failed once is not asked again. */
	if (!job_running(lane->job))
		return false;
	if (!devices)
		return true;
	/* Staging memory is registered by one of them, for all. */
	devices |= 1u << lane->job->staging_device;
	for (uint32_t left = devices & ~lane->devices_up; left; left &= left - 1) {
		int rc = bring_up(lane, (unsigned int)__builtin_ctz(left), &err);

		if (rc && rc != -EAGAIN)
			lane_fail(lane, &err);
		if (rc)
			return false;
	}
	return pin_pieces(lane);
}

/* ----------------------------------------------------------------------------- the loop -- */

static bool reap(struct lane *lane, uint64_t wait_ns)
{
	struct queue_request *done[16];
	unsigned int count = queue_reap(&lane->queue, done, 16, wait_ns);

	for (unsigned int i = 0; i < count; i++)
		transit_came_home(lane, (struct transit *)((char *)done[i] -
							   offsetof(struct transit, io)));
	return count;
}

/* The time until the first retry, and not more than `most`. */
static uint64_t until_due(const struct lane *lane, uint64_t most)
{
	uint64_t due = transit_next_due(lane), now = os_now();

	/* Nothing is sent before the path is left. */
	if (lane->leaving)
		return most;
	return due <= now ? 0 : due - now < most ? due - now : most;
}

/* Nothing moved: sleep where news will come from. A copy tells nobody when it is through, and each
 * look costs the CPU a few microseconds: so the first nap is half of what the last wait took. */
static void wait_for_news(struct lane *lane)
{
	if (lane->queue.queued) {
		reap(lane, until_due(lane, lane->copying ? WAIT_COPY_NS : WAIT_STORE_NS));
	} else if (lane->copying && lane->devices_up) {
		uint64_t nap = lane->waited_ns ? WAIT_COPY_NS : lane->last_wait_ns / 2;

		nap = nap > WAIT_COPY_MAX_NS ? WAIT_COPY_MAX_NS : nap;
		nap = nap < WAIT_COPY_NS ? WAIT_COPY_NS : nap;
		lane->waited_ns += nap;
		os_sleep(nap);
	} else if (lane->copying) {
		os_sleep(WAIT_DEVICE_NS);
	} else {
		os_sleep(until_due(lane, lane->waiting ? WAIT_STORE_NS : WAIT_IDLE_NS));
	}
}

/* May it change its queue now? What is staged stays; what is lent, or on the device, is not. */
static bool can_leave(const struct lane *lane)
{
	const struct queue_ops *queue = lane->queue.inner;

	return !lane->queue.queued &&
	       (!lane->staging.used || !(queue->lends || queue->on_device));
}

/* Nothing is with the queue any more: change to the next path down. */
static bool leave(struct lane *lane)
{
	lane->leaving = false;
	if (!step_down(lane, &lane->why_leaving))
		return true;
	lane_fail(lane, &lane->why_leaving);
	return false;
}

static void carry(struct lane *lane)
{
	while (job_running(lane->job)) {
		bool moved = false;

		while (take_allowed(lane) && transit_issue(lane)) {
			moved = true;
			/* A synchronous queue has the result already; keep the copies flowing. */
			if (reap(lane, 0))
				break;
		}
		moved |= reap(lane, 0);
		moved |= transit_advance(lane);
		if (lane->leaving && can_leave(lane)) {
			if (!leave(lane))
				return;
			moved = true;
		}
		if (moved) {
			lane->last_wait_ns = lane->waited_ns;
			lane->waited_ns = 0;
			continue;
		}
		if (!lane->staging.used && !take_work_left(lane))
			return;
		wait_for_news(lane);
	}
}

/* Bring home all that is in flight, whatever happened. */
static void drain(struct lane *lane)
{
	while (lane->queue_up && lane->queue.queued)
		reap(lane, WAIT_STORE_NS);
	/* After this no copy reads or writes a slot any more. */
	close_devices(lane);
	for (unsigned int i = staging_next(&lane->staging, 0); i < lane->staging.slot_count;
	     i = staging_next(&lane->staging, i + 1))
		transit_let_go(lane, &lane->transits[i]);
	assert(!lane->staging.used && !lane->sendable && !lane->waiting && !lane->copying);
}

/* -------------------------------------------------------------------- beginning and end -- */

/* What the callers' streams hold comes first, also for bytes that pass our own streams by. */
static int wait_for_callers(struct lane *lane, struct pen_error *err)
{
	struct pen_job *job = lane->job;
	int rc = 0;

	for (size_t i = 0; i < job->after_count && !rc; i++) {
		struct job_after *after = &job->after[i];

		lane->entered = -1;
		rc = device_enter(after->device, err);
		if (!rc)
			rc = device_poll(after->device, &after->fence, err);
		for (; rc == -EAGAIN; rc = device_poll(after->device, &after->fence, err)) {
			if (!job_running(job))
				return 0;
			os_sleep(WAIT_COPY_NS);
		}
	}
	return rc;
}

/* A queue on the device, and a core that copies, do not go by the order of our streams. */
static bool callers_come_first(struct lane *lane)
{
	struct pen_error err;

	if (!lane->path.kind->queue->on_device && !lane->job->uses_host)
		return true;
	if (!wait_for_callers(lane, &err))
		return job_running(lane->job);
	lane_fail(lane, &err);
	return false;
}

static bool wait_for_device(struct lane *lane)
{
	while (job_running(lane->job) &&
	       !lane_devices_usable(lane, 1u << lane->job->staging_device))
		os_sleep(WAIT_DEVICE_NS);
	return job_running(lane->job);
}

/* Everything a lane needs before its first request. */
static bool set_up(struct lane *lane)
{
	const struct queue_ops *queue = lane->path.kind->queue;
	struct pen_device *device = lane->job->devices[lane->job->staging_device].device;
	struct pen_error err;
	int rc;

	/* Thread and memory belong on the device's node; with several, wait to know which. */
	while (device_node(device) == NODE_PENDING && job_running(lane->job))
		os_sleep(WAIT_DEVICE_NS);
	topology_bind_thread(device_node(device));

	/* These hand memory to the GPU themselves. */
	if ((queue->on_device || queue->lends) && !wait_for_device(lane))
		return false;
	if (!callers_come_first(lane))
		return false;
	rc = open_queue(lane, &err);
	if (rc)
		rc = step_down(lane, &err);
	if (rc) {
		lane_fail(lane, &err);
		return false;
	}
	while (job_running(lane->job) && !rc &&
	       lane->staging.piece_count < lane->path.pieces_first)
		rc = lane_add_piece(lane, PIECE_TOGETHER);
	return true;
}

static void tear_down(struct lane *lane)
{
	struct piece *piece;

	drain(lane);
	if (lane->queue_up)
		queue_fini(&lane->queue);
	/* Pieces go back at once: lanes still at work may grow into them. */
	while ((piece = staging_remove(&lane->staging)) != NULL)
		piece_put(&lane->job->budget, piece);
}

void *lane_run(void *argument)
{
	struct lane *lane = argument;

	os_precise_sleep();
	/* Who wakes up is given an idle core. A new thread may have to share one for milliseconds
	 * with a lane that is at work already, so nobody works before all are there. */
	while (!atomic_load(&lane->job->started))
		os_sleep(WAIT_START_NS);
	lane->path = *lane->planned;
	if (set_up(lane))
		carry(lane);
	tear_down(lane);
	lane->cpu_ns = os_thread_cpu();
	job_lane_ended(lane->job);
	return NULL;
}

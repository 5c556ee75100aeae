/* SPDX-License-Identifier: MIT */
/*
 * Requests travel by cuFile, straight between a file and device memory. Four flavours, by the
 * transfer type, which differ only in how a call is sent and how it is known to be over:
 *
 *   0 GPU_DIRECT        submit() calls and waits                        nothing ever flies
 *   5 GPU_DIRECT_ASYNC  submit() puts the call on a stream, then a fence
 *   7 GPU_BATCH_STREAM  reap() puts all gathered calls on the stream, then one fence
 *   6 GPU_BATCH         reap() sends all gathered calls as one batch    at most 128 at a time
 *
 * A call's life:
 *
 *   free --submit--> (gathered --flush-->) flying --collect--> home --reap--> free
 *
 * Invariants
 *   1. A call is in exactly one of the lists free, gathered, flying, home.
 *   2. The library keeps pointers into a flying call; it does not move and is not reused.
 *   3. The stream's flying calls are in its order, and the last of them is sealed: a fence was
 *      marked behind it. A passed fence means that all calls up to it are over; reads of which
 *      that is not true are not put on it, see loose().
 *   4. One batch flies at a time, since a batch handle takes one submission at a time.
 *   5. A file in use by a call that is gathered or flying stays registered.
 *   6. Nothing is allocated after init().
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include "base/error.h"
#include "io/queue.h"
#include "sys/cufile.h"
#include "sys/gds.h"
#include "sys/os.h"

enum {
	FILES = 16,			/* registered by one queue; plans walk files in order */
	POLL_FAILURES_MAX = 3,		/* of one batch in a row, before it is given up */
	PAUSE_MIN_NS = 5000,
	PAUSE_MAX_NS = 200000,
	BATCH_WAIT_NS = 100000000,	/* longest single wait inside the library */
};

struct file {
	uint64_t object;		/* its id; 0: the place is free */
	void *handle;
	unsigned int busy;		/* calls gathered or flying */
	uint64_t last_used;		/* by state.clock */
	bool loose;			/* the end of a stream read may precede its bytes */
};

struct call {
	struct cufile_io io;
	struct queue_request *request;
	struct file *file;
	struct device_fence fence;	/* flavours with a stream */
	bool sealed;			/* the fence was marked behind this call */
	bool flying;			/* flavour 6: its event has not come */
	struct call *next;
};

/* First in, first out. */
struct list {
	struct call *head, *tail;
};

struct state {
	int transfer;
	struct pen_device *device;
	bool opened;			/* we are counted as a user of cuFile */
	struct call *calls;
	unsigned int depth;
	struct list idle, gathered, flying, home;
	struct file files[FILES];
	uint64_t clock;
	struct device_stream stream;
	bool stream_known;		/* to cuFile */
	void *batch;
	unsigned int batch_size;
	unsigned int poll_failures;
	struct cufile_batch_entry *entries;
	struct cufile_batch_event *events;
	struct pen_error broken;	/* why there is no stream or batch any more */
};

/* ---------------------------------------------------------------------------------- lists -- */

static void list_add(struct list *list, struct call *call)
{
	call->next = NULL;
	if (list->head)
		list->tail->next = call;
	else
		list->head = call;
	list->tail = call;
}

static struct call *list_take(struct list *list)
{
	struct call *call = list->head;

	if (call)
		list->head = call->next;
	return call;
}

static void list_remove(struct list *list, struct call *call)
{
	struct call *before = NULL, *at = list->head;

	while (at != call) {
		before = at;
		at = at->next;
	}
	if (before)
		before->next = call->next;
	else
		list->head = call->next;
	if (list->tail == call)
		list->tail = before;
}

/* ------------------------------------------------------------------------------ home again -- */

/* The call is over, with words in request->error where rc < 0; it is in no list. */
static void come_home(struct state *state, struct call *call, int rc)
{
	struct queue_request *request = call->request;

	request->result = rc;
	request->done = rc ? 0 : (size_t)call->io.moved;
	if (call->file)
		call->file->busy--;
	call->sealed = call->flying = false;
	list_add(&state->home, call);
}

static void fail_home(struct state *state, struct call *call, const struct pen_error *why)
{
	call->request->error = *why;
	call->request->error.offset = (int64_t)call->request->offset;
	come_home(state, call, why->code);
}

/* ---------------------------------------------------------------------------------- files -- */

static void forget(struct file *file)
{
	if (file->object)
		cufile_file_put(file->handle);
	file->object = 0;
}

/* The registration of an object: 0, an error with words, or 1 where every place is in use by
 * calls under way. */
static int find_file(struct state *state, struct pen_object *object, struct file **found,
		     struct pen_error *err)
{
	char reason[PEN_REASON_MAX];
	struct file *place = NULL;
	int rc;

	for (struct file *file = state->files; file < state->files + FILES; file++) {
		if (file->object == object->id) {
			place = file;
			break;
		}
		if (file->busy)
			continue;
		if (!place || !file->object ||
		    (place->object && file->last_used < place->last_used))
			place = file;
	}
	if (!place)
		return 1;
	if (place->object != object->id) {
		int fd = object->direct_fd >= 0 ? object->direct_fd : object->fd;

		forget(place);
		rc = cufile_file_take(fd, object->name, &place->handle, err);
		if (rc)
			return rc;
		place->object = object->id;
		place->loose = !gds_real(fd, reason, sizeof(reason));
	}
	place->last_used = ++state->clock;
	*found = place;
	return 0;
}

/* --------------------------------------------------------------------------------- stream -- */

static int open_stream(struct state *state, struct pen_error *err)
{
	int rc = device_stream_open(state->device, &state->stream, err);

	if (rc) {
		state->stream.handle = NULL;
		return rc;
	}
	/* What the library still does with a stream that it was told to forget, nobody knows. */
	state->stream.lent = true;
	rc = cufile_stream_open(state->stream.handle, err);
	if (rc)
		device_stream_close(state->device, &state->stream);
	state->stream_known = !rc;
	return rc;
}

/* Bring the flying calls up to `last` home by what the library left in them. */
static void bring_home(struct state *state, const struct call *last)
{
	struct call *call;

	do {
		call = list_take(&state->flying);
		come_home(state, call, cufile_outcome(&call->io, &call->request->error));
	} while (call != last);
}

/*
 * Wait for the stream and bring every flying call home by what the library left in it. Needed
 * where fences fail us: without one nothing else says when the buffers are free.
 */
static void drain(struct state *state)
{
	if (!state->flying.head)
		return;
	device_stream_drain(state->device, &state->stream);
	bring_home(state, state->flying.tail);
}

/*
 * In compatibility mode the library reads into a buffer of its own and copies from there. On an
 * H200 with libcufile 1.15 an event recorded behind a read on a stream had passed and the read had
 * left its full count, and device memory still held what had been there before; waiting for the
 * whole device helped often, not always. So nothing says when such a read is over, and it is made
 * by a call that waits. A file that goes around the host has no such copy, and what a write has
 * copied is in the file by the time it tells its count.
 */
static bool loose(const struct call *call)
{
	return !call->io.write && call->file->loose;
}

static void issue(struct state *state, struct call *call)
{
	int rc;

	if (loose(call)) {
		come_home(state, call, cufile_move(&call->io, &call->request->error));
		return;
	}
	if (!state->stream.handle) {
		fail_home(state, call, &state->broken);
		return;
	}
	rc = cufile_stream_move(&call->io, state->stream.handle, &call->request->error);
	if (rc)
		come_home(state, call, rc);
	else
		list_add(&state->flying, call);
}

/* Mark a fence behind what was issued. */
static void seal(struct state *state)
{
	struct call *last = state->flying.tail;

	if (!state->flying.head || last->sealed)
		return;
	if (device_mark(state->device, &state->stream, &last->fence, NULL))
		drain(state);
	else
		last->sealed = true;
}

static void collect_stream(struct state *state)
{
	const struct call *last = NULL;

	for (struct call *call = state->flying.head; call; call = call->next) {
		int rc = call->sealed ? device_poll(state->device, &call->fence, NULL) : 0;

		if (rc == -EAGAIN)
			break;
		if (rc) {
			drain(state);
			return;
		}
		if (call->sealed)
			last = call;
	}
	if (last)
		bring_home(state, last);
}

/* ---------------------------------------------------------------------------------- batch -- */

/* Give the batch up, with everything in it, and start a new one. */
static void reset_batch(struct state *state, const struct pen_error *why)
{
	struct call *call;

	cufile_batch_close(state->batch);
	state->poll_failures = 0;
	while ((call = list_take(&state->flying)))
		fail_home(state, call, why);
	cufile_batch_open(state->batch_size, &state->batch, &state->broken);
}

static void send_batch(struct state *state)
{
	struct pen_error err;
	struct call *call;
	unsigned int count = 0;

	if (state->flying.head)
		return;
	while (!state->batch && (call = list_take(&state->gathered)))
		fail_home(state, call, &state->broken);
	while (count < state->batch_size && (call = list_take(&state->gathered))) {
		state->entries[count++] = (struct cufile_batch_entry){
			.mode = CUFILE_MODE_BATCH,
			.base = call->io.base,
			.offset = call->io.offset,
			.base_offset = call->io.base_offset,
			.size = call->io.size,
			.file = call->io.file,
			.opcode = call->io.write,
			.cookie = (void *)(uintptr_t)(call - state->calls + 1),
		};
		call->flying = true;
		list_add(&state->flying, call);
	}
	/* After a refusal nobody knows how much of it was taken. */
	if (count && cufile_batch_submit(state->batch, count, state->entries, &err))
		reset_batch(state, &err);
}

static void collect_event(struct state *state, const struct cufile_batch_event *event)
{
	uintptr_t number = (uintptr_t)event->cookie;
	struct call *call;

	/* Not over yet, or not ours, or told twice. */
	if (event->status == CUFILE_WAITING || event->status == CUFILE_PENDING || !number ||
	    number > state->depth)
		return;
	call = &state->calls[number - 1];
	if (!call->flying)
		return;
	list_remove(&state->flying, call);
	come_home(state, call, cufile_batch_outcome(&call->io, event, &call->request->error));
}

static void collect_batch(struct state *state, uint64_t wait_ns)
{
	unsigned int count = state->batch_size;
	struct pen_error err;

	if (!state->flying.head)
		return;
	if (cufile_batch_poll(state->batch, &count, state->events, wait_ns, &err)) {
		if (++state->poll_failures >= POLL_FAILURES_MAX)
			reset_batch(state, &err);
		return;
	}
	state->poll_failures = 0;
	for (unsigned int i = 0; i < count && i < state->batch_size; i++)
		collect_event(state, &state->events[i]);
}

/* -------------------------------------------------------------------------------- the ops -- */

static void fini(struct queue *queue)
{
	struct state *state = queue->state;

	if (state->transfer == PEN_GPU_BATCH) {
		while (state->flying.head)
			collect_batch(state, BATCH_WAIT_NS);
		if (state->batch)
			cufile_batch_close(state->batch);
	} else {
		drain(state);
	}
	if (state->stream_known)
		cufile_stream_close(state->stream.handle);
	if (state->stream.handle)
		device_stream_close(state->device, &state->stream);
	for (unsigned int i = 0; state->calls && i < state->depth; i++)
		if (state->calls[i].fence.handle)
			device_fence_close(state->device, &state->calls[i].fence);
	for (unsigned int i = 0; i < FILES; i++)
		forget(&state->files[i]);
	if (state->opened)
		cufile_close();
	free(state->calls);
	free(state->entries);
	free(state->events);
	free(state);
	queue->state = NULL;
}

static int no_memory(struct pen_error *err)
{
	return error_sys(err, -ENOMEM, "set up", "a cuFile queue", -1);
}

static int init_batch(struct state *state, struct pen_error *err)
{
	unsigned int most = cufile_facts()->batch_max;

	state->batch_size = state->depth < most ? state->depth : most;
	state->entries = os_calloc(state->batch_size, sizeof(*state->entries));
	state->events = os_calloc(state->batch_size, sizeof(*state->events));
	if (!state->entries || !state->events)
		return no_memory(err);
	return cufile_batch_open(state->batch_size, &state->batch, err);
}

static int init_stream(struct state *state, struct pen_error *err)
{
	int rc = open_stream(state, err);

	for (unsigned int i = 0; !rc && i < state->depth; i++)
		rc = device_fence_open(state->device, &state->calls[i].fence, err);
	return rc;
}

static int fill_state(struct state *state, const struct queue_setup *setup, struct pen_error *err)
{
	int rc = pen_device_ready(setup->device, err);

	if (!rc)
		rc = device_enter(setup->device, err);
	if (!rc)
		rc = cufile_open(err);
	if (rc)
		return rc;
	state->opened = true;
	state->calls = os_calloc(state->depth, sizeof(*state->calls));
	if (!state->calls)
		return no_memory(err);
	for (unsigned int i = 0; i < state->depth; i++)
		list_add(&state->idle, &state->calls[i]);
	switch (state->transfer) {
	case PEN_GPU_DIRECT:
		return 0;
	case PEN_GPU_BATCH:
		return init_batch(state, err);
	}
	return init_stream(state, err);
}

static int init(struct queue *queue, const struct queue_setup *setup, struct pen_error *err)
{
	struct state *state;
	int rc;

	assert(setup->device && !setup->device->is_host && setup->depth);
	assert(setup->transfer == PEN_GPU_DIRECT || setup->transfer == PEN_GPU_DIRECT_ASYNC ||
	       setup->transfer == PEN_GPU_BATCH || setup->transfer == PEN_GPU_BATCH_STREAM);
	state = os_calloc(1, sizeof(*state));
	if (!state)
		return no_memory(err);
	state->transfer = setup->transfer;
	state->device = setup->device;
	state->depth = setup->depth;
	queue->state = state;
	rc = fill_state(state, setup, err);
	if (rc)
		fini(queue);
	return rc;
}

static void fill_call(struct call *call, struct queue_request *request)
{
	call->io = (struct cufile_io){
		.write = request->write,
		.file = call->file->handle,
		.name = request->object->name,
		.base = request->buffer,
		.size = request->length,
		.offset = (off_t)request->offset,
	};
	call->file->busy++;
}

static int submit(struct queue *queue, struct queue_request *request)
{
	struct state *state = queue->state;
	struct call *call = state->idle.head;
	struct file *file = NULL;
	int rc;

	if (!call)
		return -EAGAIN;
	rc = find_file(state, request->object, &file, &request->error);
	if (rc > 0)
		return -EAGAIN;
	list_take(&state->idle);
	call->request = request;
	call->file = file;
	if (rc) {
		come_home(state, call, rc);
		return 0;
	}
	fill_call(call, request);
	switch (state->transfer) {
	case PEN_GPU_DIRECT:
		come_home(state, call, cufile_move(&call->io, &request->error));
		break;
	case PEN_GPU_DIRECT_ASYNC:
		issue(state, call);
		seal(state);
		break;
	default:
		list_add(&state->gathered, call);
	}
	return 0;
}

/* Send what submit() has gathered. */
static void flush(struct state *state)
{
	struct call *call;

	if (state->transfer == PEN_GPU_BATCH) {
		send_batch(state);
		return;
	}
	while ((call = list_take(&state->gathered)))
		issue(state, call);
	seal(state);
}

static void collect(struct state *state, uint64_t wait_ns)
{
	if (state->transfer == PEN_GPU_BATCH)
		collect_batch(state, wait_ns < BATCH_WAIT_NS ? wait_ns : BATCH_WAIT_NS);
	else
		collect_stream(state);
}

static unsigned int reap(struct queue *queue, struct queue_request **requests, unsigned int max,
			 uint64_t wait_ns)
{
	struct state *state = queue->state;
	uint64_t pause = PAUSE_MIN_NS, start = os_now(), passed = 0;
	unsigned int count = 0;

	for (;;) {
		uint64_t left = wait_ns > passed ? wait_ns - passed : 0;

		flush(state);
		collect(state, state->home.head ? 0 : left);
		if (state->home.head || !state->flying.head || !left)
			break;
		/* A batch has waited inside the library; a fence can only be looked at. */
		if (state->transfer != PEN_GPU_BATCH || state->poll_failures) {
			os_sleep(pause < left ? pause : left);
			pause = pause * 2 < PAUSE_MAX_NS ? pause * 2 : PAUSE_MAX_NS;
		}
		passed = os_now() - start;
	}
	/* Where a batch has just ended, the next one need not wait for the next call. */
	flush(state);
	while (count < max && state->home.head) {
		struct call *call = list_take(&state->home);

		requests[count++] = call->request;
		list_add(&state->idle, call);
	}
	return count;
}

const struct queue_ops queue_cufile_ops = {
	.name = "cufile",
	.on_device = true,
	.init = init,
	.attach = queue_attach_nothing,
	.submit = submit,
	.reap = reap,
	.release = queue_release_nothing,
	.fini = fini,
};

/* -------------------------------------------------------------------------------- probing -- */

int queue_cufile_evidence(char *reason, size_t size)
{
	return gds_evidence(gds_root, reason, size);
}

int queue_cufile_probe(struct pen_object *object, struct pen_device *device, bool *compat,
		       struct pen_error *err)
{
	char reason[PEN_REASON_MAX] = "";
	void *file;
	int fd = object->direct_fd >= 0 ? object->direct_fd : object->fd;
	int rc;

	error_clear(err);
	if (device->is_host) {
		error_set(err, -ENOTSUP, "use cuFile for", device->name, -1,
			  "cuFile moves bytes between files and GPU memory");
		error_hint(err, "Use transfer type 1 (CPU_ONLY)");
		return -ENOTSUP;
	}
	if (fd < 0)
		return error_set(err, -ENOTSUP, "use cuFile for", object->name, -1,
				 "cuFile moves bytes between files and GPU memory");
	rc = pen_device_ready(device, err);
	if (!rc)
		rc = cufile_open(err);
	if (rc)
		return rc;
	rc = cufile_file_take(fd, object->name, &file, err);
	if (!rc) {
		*compat = !gds_real(fd, reason, sizeof(reason));
		cufile_file_put(file);
		/* No error, but the reason is worth reporting. */
		if (*compat)
			error_set(err, 0, "use cuFile for", object->name, -1, "%s", reason);
	}
	cufile_close();
	return rc;
}

/* SPDX-License-Identifier: MIT */
/*
 * One request's life, from the list to its memory or its store; the states are drawn in lane.h.
 *
 * A write that goes around the page cache travels in up to three parts, one after the other: a
 * ragged head through the cache, whole blocks around it, a ragged tail through it. Whole blocks
 * are whole pages (object_file.c sees to that), so no page is written both ways.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "engine/job.h"
#include "engine/lane.h"
#include "io/object.h"
#include "sys/os.h"

/* Where a transit of this state is found; NULL: nobody looks for it. */
static struct transit_list *list_of(struct lane *lane, enum transit_state state)
{
	switch (state) {
	case SENDABLE:
		return &lane->to_send;
	case WAITING:
	case COPYABLE:
	case COPYING:
		return &lane->moving;
	default:
		return NULL;
	}
}

static void list_remove(struct transit_list *list, struct transit *transit)
{
	*(transit->before ? &transit->before->next : &list->first) = transit->next;
	*(transit->next ? &transit->next->before : &list->last) = transit->before;
}

static void list_add(struct transit_list *list, struct transit *transit)
{
	transit->next = NULL;
	transit->before = list->last;
	*(list->last ? &list->last->next : &list->first) = transit;
	list->last = transit;
}

static void set_state(struct lane *lane, struct transit *transit, enum transit_state state)
{
	struct transit_list *from = list_of(lane, transit->state), *to = list_of(lane, state);

	if (from != to && from)
		list_remove(from, transit);
	if (from != to && to)
		list_add(to, transit);
	if (transit->state == COPYING && state != COPYING)
		lane->fences_taken &= ~(1ull << transit->fences);
	lane->sendable -= transit->state == SENDABLE;
	lane->waiting -= transit->state == WAITING;
	lane->copying -= transit->state == COPYABLE || transit->state == COPYING;
	lane->sendable += state == SENDABLE;
	lane->waiting += state == WAITING;
	lane->copying += state == COPYABLE || state == COPYING;
	transit->state = state;
}

void transit_let_go(struct lane *lane, struct transit *transit)
{
	/* Without a queue, after a step down that failed, nothing of it is a queue's. */
	if (lane->queue_up)
		queue_release(&lane->queue, &transit->io);
	if (lane->queue_up && lane->queue.inner->lends)
		budget_count(&lane->job->budget, -(int64_t)(transit->end - transit->offset));
	set_state(lane, transit, FREE);
	staging_put(&lane->staging, transit->slot);
	lane->full = false;
}

static void home(struct lane *lane, struct transit *transit)
{
	uint64_t direct = transit->bytes - transit->edge_bytes;

	if (transit->edge_bytes) {
		if (!lane->edge_tally)
			lane->edge_tally = job_tally(lane->job, path_kinds[PATH_CACHED].name,
						     "edges that O_DIRECT cannot write");
		atomic_fetch_add_explicit(&lane->edge_tally->bytes, transit->edge_bytes,
					  memory_order_relaxed);
	}
	atomic_fetch_add_explicit(&transit->tally->bytes, direct, memory_order_relaxed);
	atomic_fetch_add_explicit(&lane->bytes, transit->bytes, memory_order_relaxed);
	lane->delivered_bytes += transit->delivered;
	lane->coded_bytes += transit->coded;
	lane->requests++;
	if (!lane->path.kind->seen)
		look_unseen(lane, transit);
	/* Memory that is sent straight from where it lies is not free before the store has it. */
	if (transit->straight && lane_writes(lane)) {
		atomic_store_explicit(&lane->job->streamed, true, memory_order_relaxed);
		groups_came(&lane->job->gathered, transit->range.first, transit->range.count);
	}
	groups_came(&lane->job->arrived, transit->range.first, transit->range.count);
	transit_let_go(lane, transit);
}

/* --------------------------------------------------------------------------- the store -- */

/* What of the request goes to the queue next. */
static void prepare_part(struct lane *lane, struct transit *transit)
{
	struct queue_request *io = &transit->io;
	uint32_t align = lane->path.kind->direct && !transit->through
				 ? io->object->info.offset_align
				 : 0;
	uint64_t from = transit->start + transit->sent, end = transit->end;

	io->direct = align != 0;
	if (align && io->write) {
		uint64_t next = (from + align - 1) / align * align, whole = end / align * align;

		/* Up to the first whole block, whole blocks, what is left. */
		io->direct = from == next && whole > from;
		if (from != next && next < end)
			end = next;
		else if (io->direct)
			end = whole;
	}
	io->offset = from;
	io->buffer = transit->buffer ? transit->buffer + transit->sent : NULL;
	io->length = io->room = (size_t)(end - from);
	if (io->direct && !io->write)
		io->room = (io->length + align - 1) / align * align;
}

/* Hand the next part to the queue; where that has no room it stays SENDABLE. */
static void send(struct lane *lane, struct transit *transit)
{
	/* Not before: bytes are gathered faster than a core can look at them. */
	if (transit->io.write && lane->path.kind->seen && !transit->looked) {
		look(lane, transit);
		transit->looked = true;
	}
	prepare_part(lane, transit);
	/* A library without room for one more file will have some when others are home. */
	if (queue_submit(&lane->queue, &transit->io)) {
		set_state(lane, transit, SENDABLE);
		return;
	}
	if (!transit->born_ns)
		transit->born_ns = transit->io.started_ns;
	transit->tally = lane->tally;
	set_state(lane, transit, QUEUED);
}

static void send_again(struct lane *lane, struct transit *transit)
{
	transit->io.attempt++;
	send(lane, transit);
}

/* What an I/O error means, in words; the queue may know more. */
static void io_error(struct transit *transit, struct pen_error *err)
{
	struct queue_request *io = &transit->io;

	if (io->error.code) {
		*err = io->error;
		if (err->offset < 0)
			err->offset = (int64_t)io->offset;
		if (!err->object[0])
			text_copy_end(err->object, sizeof(err->object), io->object->name);
		return;
	}
	error_sys(err, io->result, io->write ? "write" : "read", io->object->name,
		  (int64_t)io->offset);
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

static bool may_pass(int result)
{
	return result == -EINTR || result == -EAGAIN || result == -EIO || result == -EBUSY;
}

/* Is this failure the path's, so that another path can carry the request? */
static bool path_barred(struct lane *lane, const struct queue_request *io)
{
	int result = io->result;

	/* What auto chose by itself it also leaves by itself. */
	if (lane->queue.inner->on_device)
		return lane->job->options.transfer == PEN_AUTO;
	/* Mapping or registering was refused; a failing store is no reason to go another way. */
	if (lane->queue.inner->lends)
		return (io->error.code && io->error.domain == PEN_DOMAIN_CUDA) ||
		       result == -ENODEV ||
		       result == -EACCES || result == -EPERM || result == -ENOMEM ||
		       result == -ENOTSUP || result == -EINVAL;
	return io->direct && (result == -EINVAL || result == -EOPNOTSUPP);
}

/* Some stores, and lent mappings, take a request only whole. */
static bool resent_whole(const struct lane *lane, const struct transit *transit)
{
	return lane->queue.inner->lends || transit->io.object->info.resend_whole;
}

static void start_over(struct lane *lane, struct transit *transit)
{
	/* A second mapping would leave the first one behind. */
	queue_release(&lane->queue, &transit->io);
	transit->sent = transit->edge_bytes = 0;
}

/* It is sent again when its time has come, each time later: give a store that stumbles a moment. */
static void wait_and_send(struct lane *lane, struct transit *transit)
{
	const struct object_info *info = &transit->io.object->info;

	transit->due_ns = os_now() + (info->retry_ns << transit->retries++);
	lane->retries++;
	if (resent_whole(lane, transit))
		start_over(lane, transit);
	set_state(lane, transit, WAITING);
}

/* Does what is under way stay when the lane changes its path? What a write has gathered does, for
 * the next path to send: its memory may have changed. Anything else is taken anew. */
static bool stays(const struct lane *lane)
{
	return lane_writes(lane) && !lane->queue.inner->on_device;
}

static void take_anew(struct lane *lane, struct transit *transit)
{
	take_hold(lane, transit->range);
	transit_let_go(lane, transit);
}

/* A request failed: try again later, leave this path, or give up. */
static void failed(struct lane *lane, struct transit *transit)
{
	const struct object_info *info = &transit->io.object->info;
	struct pen_error err;

	io_error(transit, &err);
	if (!job_running(lane->job)) {
		transit_let_go(lane, transit);
	} else if (may_pass(transit->io.result) && transit->retries < info->retries) {
		wait_and_send(lane, transit);
	} else if (path_barred(lane, &transit->io)) {
		if (!lane->leaving)
			lane->why_leaving = err;
		lane->leaving = true;
		if (stays(lane)) {
			transit->io.attempt++;
			set_state(lane, transit, SENDABLE);
		} else {
			take_anew(lane, transit);
		}
	} else {
		lane_fail(lane, &err);
		transit_let_go(lane, transit);
	}
}

/* A request moved less than it should: send the rest, unless there is none. */
static void fell_short(struct lane *lane, struct transit *transit)
{
	struct queue_request *io = &transit->io;
	bool whole = resent_whole(lane, transit);
	uint32_t align = io->direct ? io->object->info.offset_align : 1;
	size_t kept = io->done / align * align;
	struct pen_error err;

	if (!io->done && !io->write && !whole) {
		error_set(&err, -ESTALE, "read", io->object->name, (int64_t)io->offset,
			  "it ends here, %zu bytes early: it shrank while it was read", io->length);
		error_hint(&err, "Read it again when nothing writes to it");
		lane_fail(lane, &err);
	} else if ((!io->done || whole) && transit->retries >= io->object->info.retries) {
		error_set(&err, -EIO, io->write ? "write" : "read", io->object->name,
			  (int64_t)io->offset, "request after request comes up short");
		lane_fail(lane, &err);
	}
	if (!job_running(lane->job)) {
		transit_let_go(lane, transit);
		return;
	}
	if (whole) {
		wait_and_send(lane, transit);
		return;
	}
	transit->retries += !io->done;
	lane->retries++;
	if (kept || !io->direct)
		transit->sent += kept;
	else
		/* Not even one block: the rest goes through the page cache. */
		transit->through = true;
	send_again(lane, transit);
}

/* The store is done with all of it: copy it on, or be done. */
static void land(struct lane *lane, struct transit *transit)
{
	hist_add(&lane->latency, transit->io.ended_ns - transit->born_ns);
	if (lane->path.tuned)
		tuner_add(&lane->job->tuner, transit->end - transit->offset, transit->io.ended_ns);
	if (!transit->straight && !transit->io.write) {
		if (lane->queue.inner->lends)
			transit->buffer = transit->io.buffer;
		set_state(lane, transit, COPYABLE);
		return;
	}
	if (lane->path.kind->seen && !transit->io.write)
		look(lane, transit);
	home(lane, transit);
}

void transit_came_home(struct lane *lane, struct transit *transit)
{
	struct queue_request *io = &transit->io;

	if (io->result < 0) {
		failed(lane, transit);
		return;
	}
	lane->storage_bytes += io->done;
	if (io->write && lane->path.kind->direct && !io->direct)
		transit->edge_bytes += io->done;
	if (io->done < io->length) {
		fell_short(lane, transit);
		return;
	}
	transit->sent += io->length;
	if (transit->start + transit->sent < transit->end) {
		/* The next part is a request of its own to whoever counts attempts. */
		io->attempt = 0;
		send(lane, transit);
	} else {
		land(lane, transit);
	}
}

/* --------------------------------------------------------------------------- the copies -- */

/* Some of its copies are queued and one never will be: no kernel can be had for it, and no core may
 * look into a mapping. It is taken anew by the next path down. */
static void copy_barred(struct lane *lane, struct transit *transit, const struct pen_error *why)
{
	struct pen_error err;

	if (!lane->leaving)
		lane->why_leaving = *why;
	lane->leaving = true;
	for (uint32_t left = transit->devices; left; left &= left - 1) {
		unsigned int d = (unsigned int)__builtin_ctz(left);

		if (!lane_enter(lane, d, NULL))
			device_stream_drain(lane->job->devices[d].device, lane_stream(lane, d));
	}
	/* What a kernel has said of its chunks must not be taken for the next transit's. */
	if (copies_check(lane, transit, &err))
		lane_fail(lane, &err);
	take_anew(lane, transit);
}

static bool copy(struct lane *lane, struct transit *transit)
{
	struct pen_error err;
	int rc;

	if (!lane_devices_usable(lane, transit->devices))
		return false;
	assert(~lane->fences_taken);
	transit->fences = (unsigned int)__builtin_ctzll(~lane->fences_taken);
	lane->fences_taken |= 1ull << transit->fences;
	/* Even a copy that fails half-way may have queued others before. */
	set_state(lane, transit, COPYING);
	transit->decoded = 0;
	rc = copies_queue(lane, transit, &err);
	transit->copying = transit->devices;
	if (rc == -ENOTSUP && lane->queue.inner->lends)
		copy_barred(lane, transit, &err);
	else if (rc)
		lane_fail(lane, &err);
	else if (!lane_writes(lane) && lane->path.kind->seen)
		look(lane, transit);
	return true;
}

/* All bytes of a write are in the buffer: their memory may change again. */
static void gathered(struct lane *lane, struct transit *transit)
{
	groups_came(&lane->job->gathered, transit->range.first, transit->range.count);
	set_state(lane, transit, SENDABLE);
}

/* Have its copies been made? */
static bool copied(struct lane *lane, struct transit *transit)
{
	struct pen_error err;

	for (uint32_t left = transit->copying; left; left &= left - 1) {
		unsigned int d = (unsigned int)__builtin_ctz(left);
		int rc = device_poll(lane->job->devices[d].device,
				     &lane->fences[transit->fences][d], &err);

		if (rc == -EAGAIN)
			continue;
		transit->copying &= ~(1u << d);
		if (rc) {
			lane_fail(lane, &err);
			return true;
		}
	}
	if (transit->copying)
		return false;
	if (transit->decoded && copies_check(lane, transit, &err)) {
		lane_fail(lane, &err);
		return true;
	}
	if (lane_writes(lane))
		gathered(lane, transit);
	else
		home(lane, transit);
	return true;
}

/* ----------------------------------------------------------------------------- the rest -- */

/* Is there more to gather, and room for it? */
static bool gathers(struct lane *lane)
{
	return lane->job->gathered.count && !lane->full &&
	       (lane->copying || (take_allowed(lane) && take_work_left(lane)));
}

/* Send what is ready, as far as the store's depth allows. */
static bool send_ready(struct lane *lane)
{
	bool moved = false;

	/* Who sleeps in the store cannot gather, and somebody waits for that. */
	if (lane->queue.inner->waits && gathers(lane))
		return false;
	while (lane->to_send.first && lane->queue.queued < take_depth(lane)) {
		struct transit *transit = lane->to_send.first;

		send(lane, transit);
		if (transit->state == SENDABLE)
			break;
		moved = true;
		/* That took its time; see to the copies first. */
		if (lane->queue.inner->waits)
			break;
	}
	return moved;
}

/* The path is being left: nothing is sent by it, and what cannot stay is given back. */
static bool give_back(struct lane *lane, struct transit_list *list)
{
	struct transit *transit, *next;
	bool moved = false;

	for (transit = list->first; transit && !stays(lane); transit = next) {
		next = transit->next;
		if (transit->state != WAITING && transit->state != SENDABLE)
			continue;
		take_anew(lane, transit);
		moved = true;
	}
	return moved;
}

/* Copies, and what waits for its time. */
static bool advance_moving(struct lane *lane)
{
	struct transit *transit, *next;
	uint32_t behind = 0;	/* GPUs that are not through with one: nor with later ones */
	bool moved = false;

	for (transit = lane->moving.first; transit; transit = next) {
		next = transit->next;
		switch (transit->state) {
		case COPYABLE:
			moved |= copy(lane, transit);
			break;
		case COPYING:
			if (transit->copying & behind)
				break;
			if (copied(lane, transit))
				moved = true;
			else
				behind |= transit->copying;
			break;
		default:
			if (lane->leaving || os_now() < transit->due_ns)
				break;
			moved = true;
			send_again(lane, transit);
			break;
		}
	}
	return moved;
}

bool transit_advance(struct lane *lane)
{
	bool moved = advance_moving(lane);

	if (!lane->leaving)
		return send_ready(lane) || moved;
	moved |= give_back(lane, &lane->moving);
	return give_back(lane, &lane->to_send) || moved;
}

uint64_t transit_next_due(const struct lane *lane)
{
	uint64_t first = UINT64_MAX;

	if (!lane->waiting)
		return first;
	for (const struct transit *transit = lane->moving.first; transit; transit = transit->next)
		if (transit->state == WAITING && transit->due_ns < first)
			first = transit->due_ns;
	return first;
}

/* Where the bytes can go straight between the store and their memory; NULL: they are staged. */
static unsigned char *straight_to(struct lane *lane, struct range range)
{
	const struct plan *plan = lane->job->schedule->plan;
	const struct plan_request *head = &plan->requests[range.first];
	const struct plan_request *last = &plan->requests[range.first + range.count - 1];
	const struct object_info *info = &plan->objects[head->object]->info;
	uint64_t align = info->offset_align;
	unsigned char *memory;

	if (!take_straight(lane, range.first))
		return NULL;
	for (uint32_t i = 1; i < range.count; i++)
		if (!plan_stretches_on(plan, range.first + i - 1, range.first + i))
			return NULL;
	memory = plan_memory(plan, &plan->copies[head->first_copy]);
	if (!lane->path.kind->direct || !align)
		return memory;
	/* A direct read cannot be widened there, and a write's whole blocks must lie well. */
	if (!lane_writes(lane))
		return (uintptr_t)memory % info->memory_align || head->offset % align ||
				       (last->offset + last->length) % align
			       ? NULL
			       : memory;
	return ((uintptr_t)memory + (align - head->offset % align) % align) % info->memory_align
		       ? NULL
		       : memory;
}

/* User's bytes of a transit, and the GPUs they are on. */
static void count_copies(struct lane *lane, struct transit *transit)
{
	const struct plan *plan = lane->job->schedule->plan;

	transit->bytes = transit->delivered = transit->coded = transit->devices = 0;
	for (uint32_t i = 0; i < transit->range.count; i++) {
		const struct plan_request *request = &plan->requests[transit->range.first + i];

		for (uint32_t c = 0; c < request->copy_count; c++) {
			const struct plan_copy *part = &plan->copies[request->first_copy + c];
			const struct pen_device *device = plan_device(plan, part);

			transit->bytes += part->width * part->rows;
			transit->delivered += plan_memory_width(part) * part->rows;
			transit->coded += part->coding ? part->width : 0;
			if (device && !device->is_host)
				transit->devices |= 1u << plan->places[part->place].device;
		}
	}
}

/* Everything about a new transit but where its bytes are. */
static void prepare(struct lane *lane, struct transit *transit, struct range range)
{
	const struct plan *plan = lane->job->schedule->plan;
	const struct plan_request *head = &plan->requests[range.first];
	const struct plan_request *last = &plan->requests[range.first + range.count - 1];
	struct queue_request *io = &transit->io;
	uint32_t align = plan->objects[head->object]->info.offset_align;

	transit->range = range;
	transit->offset = transit->start = head->offset;
	transit->end = last->offset + last->length;
	transit->sent = transit->edge_bytes = 0;
	transit->through = transit->looked = false;
	transit->retries = 0;
	transit->born_ns = 0;
	memset(io, 0, offsetof(struct queue_request, error));
	io->object = plan->objects[head->object];
	io->write = lane_writes(lane);
	io->buffer_index = -1;
	if (lane->path.kind->direct && align && !io->write)
		transit->start -= head->offset % align;
	count_copies(lane, transit);
}

/* What the staging begins with before the first byte, so that the whole blocks of a write lie as
 * the device wants them, and numbers as they do in the object. */
static size_t lead_of(const struct lane *lane, const struct transit *transit)
{
	uint32_t align = transit->io.object->info.offset_align;

	if (lane->path.kind->direct && align)
		return transit->io.write ? transit->offset % align : 0;
	return lane->job->schedule->plan->formed_bytes ? transit->offset % PLAN_FORM_ALIGN : 0;
}

/* A slot with `size` bytes of staging memory, growing the staging where that helps. */
static struct slot *find_slot(struct lane *lane, size_t size)
{
	struct staging *staging = &lane->staging;
	bool ahead = lane->job->schedule->ahead;
	struct slot *slot = ahead ? staging_take_unused(staging, size)
				  : staging_take(staging, size);

	if (!slot && size && staging_can_grow(staging) &&
	    !lane_add_piece(lane, staging->piece_count ? PIECE_MORE : PIECE_FIRST))
		slot = staging_take_unused(staging, size);
	/* Who gathers takes what is free again only when there is nothing new to be had: making
	 * memory is slow, so the store frees some meanwhile, and the next save, which is faster,
	 * would have to make what this one did without. */
	return !slot && ahead ? staging_take(staging, size) : slot;
}

bool transit_issue(struct lane *lane)
{
	bool lends = lane->queue.inner->lends;
	struct transit *transit;
	unsigned char *memory;
	struct range range;
	struct slot *slot;
	uint64_t span;

	if (!take_next(lane, take_size(lane), &range))
		return false;
	memory = lends ? NULL : straight_to(lane, range);
	span = take_span(lane, range.first, range.first + range.count - 1);
	slot = find_slot(lane, memory || lends ? 0 : (size_t)span);
	if (!slot) {
		atomic_store_explicit(&lane->job->streamed, true, memory_order_relaxed);
		lane->full = true;
		take_hold(lane, range);
		return false;
	}
	transit = &lane->transits[slot - lane->staging.slots];
	transit->slot = slot;
	prepare(lane, transit, range);
	transit->straight = memory != NULL;
	transit->buffer = memory       ? memory
			  : slot->memory ? slot->memory + lead_of(lane, transit)
					 : NULL;
	if (slot->memory && slot->piece < lane->queue.setup.pieces)
		transit->io.buffer_index = (int)slot->piece;
	transit->io.serial =
		atomic_fetch_add_explicit(&lane->job->serial, 1, memory_order_relaxed) + 1;
	if (lends)
		budget_count(&lane->job->budget, (int64_t)(transit->end - transit->offset));
	if (!lane_writes(lane)) {
		send(lane, transit);
	} else if (memory) {
		set_state(lane, transit, SENDABLE);
	} else {
		set_state(lane, transit, COPYABLE);
		copy(lane, transit);
	}
	return true;
}

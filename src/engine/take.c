/* SPDX-License-Identifier: MIT */
/*
 * Which requests a lane carries next. Lanes take from their list through an atomic cursor: the next
 * request, and as many of its neighbours as make one large request of the size in force. Nothing is
 * ever cut here, only joined.
 */
#include <assert.h>
#include "engine/job.h"
#include "engine/lane.h"
#include "io/object.h"

uint64_t take_size(struct lane *lane)
{
	struct pen_job *job = lane->job;
	const struct path *path = &lane->path;
	uint64_t size = path->tuned ? tuner_get(&job->tuner).size : path->size;
	uint64_t left = atomic_load_explicit(&job->bytes_left[path->side], memory_order_relaxed);
	uint64_t fair = left / (job->lane_count * 2);

	if (size > path->size)
		size = path->size;
	if (fair < job->request_least)
		fair = job->request_least;
	/* Towards the end smaller bites, so that no lane is left alone with a large one. */
	return fair < size && !job->options.request_size ? fair : size;
}

unsigned int take_depth(struct lane *lane)
{
	const struct queue_ops *queue = lane->queue.inner;
	unsigned int depth, peers = lane->peers;

	if (lane->job->schedule->one_at_a_time)
		return 1;
	if (!lane->path.tuned)
		return queue->lends ? 2 : queue->on_device ? 16 : LANE_DEPTH;
	depth = tuner_get(&lane->job->tuner).depth;
	depth = depth / peers + (lane->index < depth % peers);
	/* Who has something under way must be able to finish it. */
	return depth || (!lane->staging.used && !lane->held_count) ? depth : 1;
}

bool take_allowed(struct lane *lane)
{
	unsigned int depth = take_depth(lane);

	if (lane->leaving || lane->staging.used == lane->staging.slot_count)
		return false;
	if (lane->job->schedule->one_at_a_time)
		return !lane->staging.used;
	/* A lent buffer is pinned until its copy is through, so what is being copied counts. */
	if (lane->queue.inner->lends)
		return lane->staging.used < depth;
	if (!lane_writes(lane))
		return lane->queue.queued < depth;
	/* A write fills slots ahead of the store: as many again, or, where somebody waits for that,
	 * as many as there is memory for. What is with the GPUs keeps their link busy; more would
	 * only be looked at in vain. */
	if (!lane->job->gathered.count || lane->queue.inner->on_device)
		return lane->staging.used < 2 * depth;
	return depth > 0 && lane->copying < LANE_COPIES;
}

bool take_straight(const struct lane *lane, uint32_t request)
{
	const struct plan *plan = lane->job->schedule->plan;
	const struct plan_copy *copy = &plan->copies[plan->requests[request].first_copy];

	if (lane->queue.inner->on_device)
		return true;
	/* Who asks when memory may change again wants it soon, not when the store has it. */
	return plan_is_stretch(plan, request) && !lane->job->gathered.count &&
	       plan_device(plan, copy)->is_host;
}

static bool follows(const struct plan *plan, uint32_t last, uint32_t next)
{
	const struct plan_request *a = &plan->requests[last], *b = &plan->requests[next];

	return next == last + 1 && a->object == b->object && a->offset + a->length == b->offset;
}

/* May `next` join a larger request that ends with `last`? */
static bool joins(const struct lane *lane, uint32_t last, uint32_t next)
{
	const struct plan *plan = lane->job->schedule->plan;

	/* What can go straight to its memory does, rather than being staged in company. */
	return follows(plan, last, next) &&
	       (!take_straight(lane, last) || plan_stretches_on(plan, last, next));
}

uint64_t take_span(const struct lane *lane, uint32_t first, uint32_t last)
{
	const struct plan *plan = lane->job->schedule->plan;
	const struct plan_request *a = &plan->requests[first], *b = &plan->requests[last];
	uint64_t align = plan->objects[a->object]->info.offset_align;

	if (!lane->path.kind->direct || !align)
		align = plan->formed_bytes ? PLAN_FORM_ALIGN : 1;
	return (b->offset + b->length + align - 1) / align * align - a->offset / align * align;
}

/* What was taken goes through the page cache and is not there: bring it in by the cheapest way that
 * the kernel has, which is not the read itself. */
static void fetch(const struct lane *lane, const struct range *range)
{
	const struct plan *plan = lane->job->schedule->plan;
	const struct plan_request *first = &plan->requests[range->first];

	object_fetch(plan->objects[first->object], first->offset,
		     take_span(lane, range->first, range->first + range->count - 1));
}

/* Take the next request of the list and its neighbours, up to `limit` bytes. */
static bool take(struct lane *lane, uint64_t limit, struct range *range)
{
	struct pen_job *job = lane->job;
	const struct work *work = &job->schedule->work[lane->path.side];
	const struct plan_request *requests = job->schedule->plan->requests;
	_Atomic size_t *cursor = &job->next[lane->path.side];
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
			    take_span(lane, range->first, next) > limit)
				break;
			bytes += requests[next].length;
			range->count++;
		}
	} while (!atomic_compare_exchange_weak_explicit(cursor, &at, at + range->count,
							memory_order_relaxed,
							memory_order_relaxed));
	atomic_fetch_sub_explicit(&job->bytes_left[lane->path.side], bytes, memory_order_relaxed);
	if (job->schedule->fetched && lane->path.side == THROUGH)
		fetch(lane, range);
	return true;
}

void take_hold(struct lane *lane, struct range range)
{
	assert(lane->held_count < 2 * lane->staging.slot_count);
	lane->held[lane->held_count++] = range;
}

bool take_next(struct lane *lane, uint64_t limit, struct range *range)
{
	struct range *held;

	if (!lane->held_count)
		return take(lane, limit, range);
	held = &lane->held[lane->held_count - 1];
	*range = (struct range){ held->first, 1 };
	while (range->count < held->count &&
	       take_span(lane, held->first, held->first + range->count) <= limit &&
	       joins(lane, held->first + range->count - 1, held->first + range->count))
		range->count++;
	held->first += range->count;
	held->count -= range->count;
	if (!held->count)
		lane->held_count--;
	return true;
}

bool take_work_left(struct lane *lane)
{
	return lane->held_count ||
	       atomic_load_explicit(&lane->job->next[lane->path.side], memory_order_relaxed) <
		       lane->job->schedule->work[lane->path.side].count;
}

/* SPDX-License-Identifier: MIT */
/*
 * Digesting bytes as they pass: of a read when they have landed, of a write when they are gathered,
 * each time in the lane's own buffer. A chunk that is moved whole lies in one request, so its value
 * does not depend on the order in which requests come home. Where read extents overlap, several
 * requests may pass the same chunk: each that sees it whole writes the same, and what was seen
 * whole by one stays so whatever others missed.
 */
#include "base/digest.h"
#include "engine/job.h"
#include "engine/lane.h"
#include "io/object.h"

static void keep(const struct pen_digests *digests, uint64_t chunk, uint64_t value)
{
	__atomic_store_n(&digests->values[chunk], value, __ATOMIC_RELAXED);
	__atomic_store_n(&digests->states[chunk], (unsigned char)PEN_CHUNK_DIGESTED,
			 __ATOMIC_RELAXED);
}

/* A chunk that somebody has seen whole stays so. */
static void miss(const struct pen_digests *digests, uint64_t chunk)
{
	unsigned char state = PEN_CHUNK_UNTOUCHED;

	__atomic_compare_exchange_n(&digests->states[chunk], &state,
				    (unsigned char)PEN_CHUNK_UNVERIFIED, false, __ATOMIC_RELAXED,
				    __ATOMIC_RELAXED);
}

/* `data` is where the transit's first byte lies; NULL: nobody sees it. */
static void walk(struct lane *lane, const struct transit *transit, const unsigned char *data)
{
	uint32_t object = lane->job->schedule->plan->requests[transit->range.first].object;
	const struct pen_digests *digests = lane->job->digests ? lane->job->digests[object] : NULL;
	uint64_t size, next;

	if (!digests)
		return;
	size = digests->object->info.size ? digests->object->info.size : UINT64_MAX;
	for (uint64_t at = transit->offset; at < transit->end; at = next) {
		uint64_t chunk = at / digests->chunk, begin = chunk * digests->chunk;
		uint64_t stop = size - begin < digests->chunk ? size : begin + digests->chunk;

		next = stop < transit->end ? stop : transit->end;
		if (chunk < digests->count && data && at == begin && next == stop) {
			keep(digests, chunk,
			     digest_kind(digests->kind)->of(data + (at - transit->offset),
							    (size_t)(stop - begin)));
			lane->digested_bytes += stop - begin;
			continue;
		}
		if (chunk < digests->count)
			miss(digests, chunk);
		lane->unverified_bytes += next - at;
	}
}

void look(struct lane *lane, const struct transit *transit)
{
	walk(lane, transit, transit->buffer + (transit->offset - transit->start));
}

void look_unseen(struct lane *lane, const struct transit *transit)
{
	walk(lane, transit, NULL);
}

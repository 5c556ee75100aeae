/* SPDX-License-Identifier: MIT */
/*
 * Digesting bytes as they pass: of a read when they have landed, of a write when they are
 * gathered, each time in the lane's own buffer. A chunk lies in one request, so each entry of the
 * table has one writer, and its value does not depend on the order in which requests come home;
 * only the states of chunks that were moved in part have several writers, who all write the same.
 */
#include "base/digest.h"
#include "engine/job.h"
#include "engine/lane.h"
#include "io/object.h"

static void set_state(const struct pen_digests *digests, uint64_t chunk, enum pen_chunk state)
{
	__atomic_store_n(&digests->states[chunk], (unsigned char)state, __ATOMIC_RELAXED);
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
			digests->values[chunk] = digest_kind(digests->kind)->of(
				data + (at - transit->offset), (size_t)(stop - begin));
			set_state(digests, chunk, PEN_CHUNK_DIGESTED);
			lane->digested_bytes += stop - begin;
			continue;
		}
		if (chunk < digests->count)
			set_state(digests, chunk, PEN_CHUNK_UNVERIFIED);
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

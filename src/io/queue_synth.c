/* SPDX-License-Identifier: MIT */
/*
 * Plays the made-up stores of synth.h: each request is given the moment it is due, and its bytes
 * are made (or checked) when that moment has come.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/pattern.h"
#include "io/queue.h"
#include "io/synth.h"
#include "sys/os.h"

static int synth_init(struct queue *queue, const struct queue_setup *setup, struct pen_error *err)
{
	(void)setup;
	queue->state = os_calloc(1, sizeof(struct queue_list));
	return queue->state ? 0 : error_sys(err, -ENOMEM, "set up", "the synthetic queue", -1);
}

/* When a request of this length, sent now, is through. */
static uint64_t due(struct synth *synth, uint64_t now, uint64_t length)
{
	uint64_t flight = atomic_fetch_add(&synth->in_flight, length) + length;
	uint64_t peak = atomic_load(&synth->peak);
	uint64_t rate = synth->rate, from, to;

	while (flight > peak && !atomic_compare_exchange_weak(&synth->peak, &peak, flight))
		;
	if (!rate)
		return now + synth->latency_ns;
	if (synth->knee && flight > synth->knee)
		rate = rate > 10 ? rate / 10 * 7 : 1;
	from = atomic_load(&synth->wire_free_ns);
	do {
		to = (from > now ? from : now) + (uint64_t)((double)length / (double)rate * 1e9);
	} while (!atomic_compare_exchange_weak(&synth->wire_free_ns, &from, to));
	return to + synth->latency_ns;
}

static int synth_submit(struct queue *queue, struct queue_request *request)
{
	request->due_ns = due(synth_of(request->object), request->started_ns, request->length);
	queue_list_add(queue->state, request);
	return 0;
}

static void finish(struct queue_request *request)
{
	struct synth *synth = synth_of(request->object);

	atomic_fetch_sub(&synth->in_flight, request->length);
	if (!request->write && synth->pattern) {
		pattern_fill(request->buffer, request->length, request->offset);
	} else if (!request->write) {
		memset(request->buffer, 0, request->length);
	} else if (synth->pattern) {
		size_t bad = pattern_check(request->buffer, request->length, request->offset);

		if (bad < request->length) {
			request->result = error_set(&request->error, -EILSEQ, "write",
						    request->object->name,
						    (int64_t)(request->offset + bad),
						    "the byte is not the pattern's");
			return;
		}
	}
	request->done = request->length;
}

static unsigned int synth_reap(struct queue *queue, struct queue_request **requests,
			       unsigned int max, uint64_t wait_ns)
{
	struct queue_list *list = queue->state;
	struct queue_list still = { NULL, NULL };
	struct queue_request *request;
	uint64_t now = os_now(), next = UINT64_MAX;
	unsigned int count = 0;

	for (request = list->first; request; request = request->next)
		if (request->due_ns < next)
			next = request->due_ns;
	if (next > now && wait_ns)
		os_sleep(next - now < wait_ns ? next - now : wait_ns);
	now = os_now();
	while ((request = queue_list_take(list)) != NULL) {
		if (count < max && request->due_ns <= now) {
			finish(request);
			requests[count++] = request;
		} else {
			queue_list_add(&still, request);
		}
	}
	*list = still;
	return count;
}

static void synth_fini(struct queue *queue)
{
	free(queue->state);
}

const struct queue_ops queue_synth_ops = {
	.name = "synthetic",
	.init = synth_init,
	.attach = queue_attach_nothing,
	.submit = synth_submit,
	.reap = synth_reap,
	.release = queue_release_nothing,
	.fini = synth_fini,
};

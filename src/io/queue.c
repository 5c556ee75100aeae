/* SPDX-License-Identifier: MIT */
/* The one wrapper around queues: contract checked on the way in and on the way out. */
#include <assert.h>
#include <errno.h>
#include "base/error.h"
#include "io/queue.h"
#include "sys/os.h"

int queue_init(struct queue *queue, const struct queue_ops *ops, const struct queue_setup *setup,
	       struct pen_error *err)
{
	assert(setup->depth);
	queue->setup = *setup;
	queue->inner = ops;
	queue->ops = setup->inject ? &queue_fault_ops : ops;
	queue->queued = 0;
	queue->state = NULL;
	return queue->ops->init(queue, setup, err);
}

void queue_attach(struct queue *queue, unsigned int index, void *memory, size_t size)
{
	assert(index < queue->setup.pieces);
	queue->ops->attach(queue, index, memory, size);
}

int queue_submit(struct queue *queue, struct queue_request *request)
{
	int rc;

	assert(request->length && request->room >= request->length);
	assert(request->buffer || queue->inner->lends);
	assert(!request->direct || request->object->direct_fd >= 0);
	if (queue->queued == queue->setup.depth)
		return -EAGAIN;
	request->result = 0;
	request->done = 0;
	request->error.code = 0;
	request->started_ns = os_now();
	rc = queue->ops->submit(queue, request);
	assert(!rc || rc == -EAGAIN);
	if (!rc)
		queue->queued++;
	return rc;
}

unsigned int queue_reap(struct queue *queue, struct queue_request **requests, unsigned int max,
			uint64_t wait_ns)
{
	unsigned int count;

	assert(max);
	if (!queue->queued)
		return 0;
	count = queue->ops->reap(queue, requests, max, wait_ns);
	assert(count <= max && count <= queue->queued);
	for (unsigned int i = 0; i < count; i++) {
		assert(requests[i]->result <= 0);
		assert(requests[i]->result || requests[i]->done <= requests[i]->room);
		requests[i]->ended_ns = os_now();
	}
	queue->queued -= count;
	return count;
}

void queue_release(struct queue *queue, struct queue_request *request)
{
	queue->ops->release(queue, request);
}

void queue_fini(struct queue *queue)
{
	queue->ops->fini(queue);
	queue->state = NULL;
}

void queue_attach_nothing(struct queue *queue, unsigned int index, void *memory, size_t size)
{
	(void)queue;
	(void)index;
	(void)memory;
	(void)size;
}

void queue_release_nothing(struct queue *queue, struct queue_request *request)
{
	(void)queue;
	(void)request;
}

/* SPDX-License-Identifier: MIT */
/*
 * pread and pwrite on the lane's own thread: the page cache's queue, and the step down where
 * io_uring is not to be had. The work is done in submit(); reap() hands out the results.
 */
#include <errno.h>
#include <stdlib.h>
#include "base/error.h"
#include "io/queue.h"
#include "sys/os.h"

static int sync_init(struct queue *queue, const struct queue_setup *setup, struct pen_error *err)
{
	(void)setup;
	queue->state = os_calloc(1, sizeof(struct queue_list));
	return queue->state ? 0 : error_sys(err, -ENOMEM, "set up", "the sync queue", -1);
}

static int sync_submit(struct queue *queue, struct queue_request *request)
{
	int fd = request->direct ? request->object->direct_fd : request->object->fd;
	/* Only a direct read is asked for more than is needed: its length must be aligned. */
	size_t want = request->direct && !request->write ? request->room : request->length;
	ssize_t n = request->write ? os_pwrite(fd, request->buffer, want, request->offset)
				   : os_pread(fd, request->buffer, want, request->offset);

	if (n < 0)
		request->result = (int)n;
	else
		request->done = (size_t)n;
	queue_list_add(queue->state, request);
	return 0;
}

static unsigned int sync_reap(struct queue *queue, struct queue_request **requests,
			      unsigned int max, uint64_t wait_ns)
{
	unsigned int count = 0;

	(void)wait_ns;
	while (count < max && (requests[count] = queue_list_take(queue->state)) != NULL)
		count++;
	return count;
}

static void sync_fini(struct queue *queue)
{
	free(queue->state);
}

const struct queue_ops queue_sync_ops = {
	.name = "sync",
	.waits = true,
	.init = sync_init,
	.attach = queue_attach_nothing,
	.submit = sync_submit,
	.reap = sync_reap,
	.release = queue_release_nothing,
	.fini = sync_fini,
};

/* SPDX-License-Identifier: MIT */
/*
 * The page cache itself as the source of DMA: a range of the file is mapped and registered with
 * the GPU read-only, the GPU reads the pages where they are, and no core copies anything. Costs a
 * third of the CPU time of pread. The queue lends its mapping as the buffer; release() takes it
 * back once the GPU has let go.
 *
 * The mapping is shared: registering a private file mapping was seen to hang the driver.
 * A file cut short between mapping and registering makes the registration fail; pages once
 * registered stay. The CPU never touches the mapping, so there is no SIGBUS to fear.
 */
#include <errno.h>
#include <stdlib.h>
#include "base/error.h"
#include "io/queue.h"
#include "sys/os.h"

static int map_init(struct queue *queue, const struct queue_setup *setup, struct pen_error *err)
{
	if (!setup->device->maps) {
		error_set(err, -ENOTSUP, "map the page cache for", setup->device->name, -1,
			  "the driver cannot register read-only memory");
		return -ENOTSUP;
	}
	queue->state = os_calloc(1, sizeof(struct queue_list));
	return queue->state ? 0 : error_sys(err, -ENOMEM, "set up", "the map queue", -1);
}

static int map_range(struct queue *queue, struct queue_request *request)
{
	size_t page = os_page_size();
	uint64_t start = request->offset / page * page;
	size_t before = (size_t)(request->offset - start);
	size_t size = (before + request->length + page - 1) / page * page;
	int rc = os_map_file(request->object->fd, start, size, &request->mapping);

	if (rc)
		return rc;
	rc = device_pin(queue->setup.device, request->mapping, size, true, &request->error);
	if (rc) {
		os_unmap(request->mapping, size);
		return rc;
	}
	request->mapping_size = size;
	request->buffer = (unsigned char *)request->mapping + before;
	request->done = request->length;
	return 0;
}

static int map_submit(struct queue *queue, struct queue_request *request)
{
	request->mapping = NULL;
	request->result = map_range(queue, request);
	if (request->result)
		request->mapping = NULL;
	queue_list_add(queue->state, request);
	return 0;
}

static unsigned int map_reap(struct queue *queue, struct queue_request **requests,
			     unsigned int max, uint64_t wait_ns)
{
	return queue_sync_ops.reap(queue, requests, max, wait_ns);
}

static void map_release(struct queue *queue, struct queue_request *request)
{
	if (!request->mapping)
		return;
	device_unpin(queue->setup.device, request->mapping, NULL);
	os_unmap(request->mapping, request->mapping_size);
	request->mapping = NULL;
}

static void map_fini(struct queue *queue)
{
	free(queue->state);
}

const struct queue_ops queue_map_ops = {
	.name = "map",
	.waits = true,
	.lends = true,
	.init = map_init,
	.attach = queue_attach_nothing,
	.submit = map_submit,
	.reap = map_reap,
	.release = map_release,
	.fini = map_fini,
};

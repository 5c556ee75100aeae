/* SPDX-License-Identifier: MIT */
/*
 * Models from real files: which files make a model, what is refused and in which words, and that
 * every tensor, and every box of one, arrives with its bytes. Each byte of a test file is a
 * function of its place, so that what arrives can be told from what should have. Boxes are
 * checked against a loop over single bits, which knows nothing of runs, rows and pitches.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <sys/resource.h>
#include "fake_gpu.h"
#include "format/index.h"
#include "format/load.h"
#include "format/model.h"
#include "io/object.h"
#include "scratch.h"
#include "sys/fault.h"
#include "test.h"

static struct pen_error err;
static struct pen_model *model;

/* ------------------------------------------------------------------------------ test files -- */

/* Reads give at most this much at once. */
static size_t read_most = SIZE_MAX;

ssize_t __real_pread64(int fd, void *buffer, size_t length, off_t offset);
ssize_t __wrap_pread64(int fd, void *buffer, size_t length, off_t offset);
ssize_t __wrap_pread64(int fd, void *buffer, size_t length, off_t offset)
{
	return __real_pread64(fd, buffer, length < read_most ? length : read_most, offset);
}

static unsigned char byte_at(uint64_t place)
{
	return (unsigned char)((place * 0x9e3779b97f4a7c15ull + 0x1234) >> 37);
}

static void write_file(const char *path, const void *bytes, size_t length)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	CHECK(fd >= 0);
	CHECK_EQ(write(fd, bytes, length), length);
	close(fd);
}

/* A safetensors file with this header and `data` bytes behind it. */
static const char *write_model(const char *name, const char *header, size_t data)
{
	size_t length = strlen(header), size = 8 + length + data;
	unsigned char *bytes = malloc(size);
	const char *path = in_scratch(name);

	CHECK(bytes != NULL);
	for (size_t i = 0; i < size; i++)
		bytes[i] = i < 8 ? (unsigned char)((uint64_t)length >> (8 * i)) : byte_at(i);
	memcpy(bytes + 8, header, length);
	write_file(path, bytes, size);
	free(bytes);
	return path;
}

/* One with tensors of bytes: "name", size, ..., NULL. */
static const char *write_tensors(const char *file, ...)
{
	char header[4000] = "{";
	size_t at = 1, data = 0;
	va_list args;

	va_start(args, file);
	for (const char *name; (name = va_arg(args, const char *)) != NULL;) {
		size_t size = va_arg(args, unsigned int);

		at += (size_t)snprintf(header + at, sizeof(header) - at,
				       "%s\"%s\":{\"dtype\":\"U8\",\"shape\":[%zu],"
				       "\"data_offsets\":[%zu,%zu]}", at > 1 ? "," : "", name, size,
				       data, data + size);
		data += size;
	}
	va_end(args);
	snprintf(header + at, sizeof(header) - at, "}");
	return write_model(file, header, data);
}

static const char *write_text(const char *name, const char *text)
{
	const char *path = in_scratch(name);

	write_file(path, text, strlen(text));
	return path;
}

static const char *folder(void)
{
	in_scratch("");
	return scratch;
}

#define INDEX "model.safetensors.index.json"

static void open_model(const char *path)
{
	int rc = pen_model_open(path, &model, &err);

	if (rc)
		fprintf(stderr, "%s: %s. %s\n", err.object, err.message, err.hint);
	CHECK_EQ(rc, 0);
}

static void refused(const char *path, int code, const char *object, const char *words,
		    const char *hint)
{
	unsigned int before = entries_in("/proc/self/fd");
	int rc;

	memset(&err, 0x55, sizeof(err));
	rc = pen_model_open(path, &model, &err);
	if (rc != code || !strstr(err.message, words) || !strstr(err.hint, hint) ||
	    !strstr(err.object, object))
		fprintf(stderr, "%d: %s: %s. %s\n", rc, err.object, err.message, err.hint);
	CHECK_EQ(rc, code);
	CHECK(!model);
	CHECK_EQ(err.code, code);
	CHECK(strstr(err.object, object) != NULL);
	CHECK(strstr(err.message, words) != NULL);
	CHECK(err.hint[0] && strstr(err.hint, hint) != NULL);
	CHECK_EQ(entries_in("/proc/self/fd"), before);
	CHECK_EQ(pen_model_open(path, &model, NULL), code);
}

/* The names of the tensors, in their order. */
static void has_tensors(const char *names)
{
	const struct pen_tensor *tensors;
	size_t count = pen_model_tensors(model, &tensors);
	char all[2000] = "";

	for (size_t i = 0; i < count; i++) {
		snprintf(all + strlen(all), sizeof(all) - strlen(all), "%s%s", i ? " " : "",
			 tensors[i].name);
		CHECK_EQ(tensors[i].name_length, strlen(tensors[i].name));
		CHECK(pen_model_find(model, tensors[i].name) == &tensors[i]);
		CHECK(pen_model_find_name(model, tensors[i].name, tensors[i].name_length) ==
		      &tensors[i]);
		CHECK(!pen_model_find_name(model, tensors[i].name, tensors[i].name_length + 1));
	}
	CHECK_TEXT(all, names);
}

static void has_files(const char *names)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(model, &files);
	char all[2000] = "";

	for (size_t i = 0; i < count; i++) {
		snprintf(all + strlen(all), sizeof(all) - strlen(all), "%s%s", i ? " " : "",
			 files[i].name);
		CHECK_EQ(files[i].size, pen_object_size(files[i].object));
	}
	CHECK_TEXT(all, names);
}

static const char *warning(size_t index)
{
	const char *const *warnings;

	CHECK(index < pen_model_warnings(model, &warnings));
	return warnings[index];
}

static size_t warnings(void)
{
	return pen_model_warnings(model, NULL);
}

/* ------------------------------------------------------------------------------- one file -- */

TEST(a_file)
{
	const char *header =
		"{\"__metadata__\":{\"format\":\"pt\"},"
		"\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[3,27]},"
		"\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}   ";
	const char *path = write_model("one.safetensors", header, 27);
	const struct pen_model_file *files;
	const struct pen_tensor *tensor;

	open_model(path);
	has_tensors("a b");
	has_files("one.safetensors");
	CHECK_EQ(warnings(), 0);
	CHECK_EQ(pen_model_files(model, &files), 1);
	CHECK_TEXT(files[0].path, path);
	CHECK_EQ(files[0].data, 8 + strlen(header));
	CHECK_EQ(files[0].metadata_count, 1);
	CHECK_TEXT(files[0].metadata[0].value, "pt");
	tensor = pen_model_find(model, "b");
	CHECK_EQ(tensor->rank, 2);
	CHECK_EQ(tensor->shape[1], 3);
	CHECK_EQ(tensor->bytes, 24);
	CHECK_EQ(tensor->offset, 8 + strlen(header) + 3);
	CHECK(!pen_model_find(model, "c") && !pen_model_find(model, ""));
	pen_model_close(model);
	pen_model_close(NULL);
}

TEST(a_file_of_any_name)
{
	char path[600];

	/* No suffix is needed where the file is named. */
	snprintf(path, sizeof(path), "%s", write_tensors("blob", "x", 4, NULL));
	open_model(path);
	has_tensors("x");
	pen_model_close(model);
	CHECK(!chdir(folder()));
	open_model("blob");
	has_files("blob");
	pen_model_close(model);
}

TEST(an_empty_model)
{
	open_model(write_model("none.safetensors", "{}", 0));
	has_tensors("");
	CHECK(!pen_model_find(model, "x"));
	pen_model_close(model);
}

/* Files beside those of the index are left out, but not in silence. */
TEST(files_that_the_index_never_names_are_told)
{
	const char *const *warnings;

	write_tensors("1.safetensors", "a", 4, NULL);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\"}}");
	open_model(folder());
	CHECK_EQ(pen_model_warnings(model, NULL), 0);
	pen_model_close(model);
	write_tensors("consolidated.safetensors", "a", 4, NULL);
	open_model(folder());
	has_files("1.safetensors");
	CHECK_EQ(pen_model_warnings(model, &warnings), 1);
	CHECK(strstr(warnings[0], "consolidated.safetensors is in the folder but not named"));
	pen_model_close(model);
	write_tensors("0.safetensors", "z", 4, NULL);
	open_model(folder());
	has_tensors("a");
	CHECK_EQ(pen_model_warnings(model, &warnings), 1);
	CHECK(strstr(warnings[0], "2 files (0.safetensors ...) are in the folder"));
	pen_model_close(model);
	/* Who names the index means it. */
	open_model(in_scratch(INDEX));
	CHECK_EQ(pen_model_warnings(model, NULL), 0);
	pen_model_close(model);
}

TEST(what_is_no_model_is_refused)
{
	refused("", -ENOENT, "\"\"", "empty", "");
	refused(in_scratch("nowhere"), -ENOENT, "nowhere", "No such file", "Check the path");
	refused(write_text("empty", ""), -EBADMSG, "empty", "0 bytes, too few", "cut short");
	refused(write_text("short", "1234567"), -EBADMSG, "short", "7 bytes, too few", "cut short");
	refused(write_text("torch", "PK\3\4 and more"), -EBADMSG, "torch", "more than", "zip");
	refused("/dev/null", -ESPIPE, "/dev/null", "how large", "regular file");
	CHECK(!mkfifo(in_scratch("pipe"), 0600));
	refused(in_scratch("pipe"), -ESPIPE, "pipe", "pipe", "regular file");
	CHECK(!mkfifo(in_scratch("pipe.json"), 0600));
	refused(in_scratch("pipe.json"), -EBADMSG, "pipe.json", "not a file", "Name a folder");
	write_text("large.json", "{}");
	CHECK(!truncate(in_scratch("large.json"), 100000001));
	refused(in_scratch("large.json"), -EBADMSG, "large.json", "at most 100000000", "");
	CHECK(!chdir(folder()));
	write_text("pattern:64K", "{}");
	refused("pattern:64K", -EINVAL, "pattern:64K", "synthetic", "./");
}

TEST(a_file_that_was_cut_short)
{
	char path[600];
	int fd;

	snprintf(path, sizeof(path), "%s", write_tensors("x.safetensors", "a", 100, "b", 50, NULL));
	CHECK(!truncate(path, 200));
	refused(path, -EBADMSG, "x.safetensors", "150 bytes, but the file ends after", "cut short");
	CHECK_EQ(err.offset, 200);
	CHECK_EQ(err.domain, PEN_DOMAIN_FORMAT);
	CHECK(!truncate(path, 20));
	refused(path, -EBADMSG, "x.safetensors", "the file ends after 12", "cut short");
	fd = open(path, O_WRONLY | O_CLOEXEC);
	CHECK(fd >= 0 && !ftruncate(fd, 8));
	close(fd);
	refused(path, -EBADMSG, "x.safetensors", "the file ends after 0", "cut short");
}

static unsigned int preads;
static const char *shrinking;

/* Cut the file at the second read of it: between the length and the header. */
static int shrink(const char *name)
{
	if (!strcmp(name, "pread") && ++preads == 2)
		CHECK(!truncate(shrinking, 12));
	return 0;
}

TEST(a_file_that_shrinks_while_it_is_read)
{
	shrinking = write_tensors("x.safetensors", "a", 100, NULL);
	sys_fault_hook = shrink;
	CHECK_EQ(pen_model_open(shrinking, &model, &err), -ESTALE);
	CHECK(strstr(err.message, "shorter") && strstr(err.object, "x.safetensors"));
	CHECK_EQ(err.offset, 12);
}

TEST(reads_that_give_little)
{
	char path[600];

	snprintf(path, sizeof(path), "%s", write_tensors("x.safetensors", "a", 100, "b", 9, NULL));
	write_text(INDEX, "{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"x.safetensors\"}}");
	for (read_most = 1; read_most < 20; read_most++) {
		open_model(folder());
		has_tensors("a b");
		pen_model_close(model);
	}
}

/* -------------------------------------------------------------------------------- folders -- */

TEST(a_folder_without_an_index)
{
	write_tensors("b.safetensors", "y", 4, "x", 4, NULL);
	write_tensors("a.safetensors", "z", 4, NULL);
	write_tensors("a10.safetensors", "w", 4, NULL);
	write_text("config.json", "{}");
	write_text(".hidden.safetensors", "no model");
	write_text("pytorch_model.bin", "something else");
	open_model(folder());
	has_files("a.safetensors a10.safetensors b.safetensors");
	has_tensors("z w y x");
	CHECK_EQ(warnings(), 0);
	pen_model_close(model);
}

TEST(a_tensor_in_two_files_is_refused)
{
	write_tensors("a.safetensors", "x", 4, "both", 4, NULL);
	write_tensors("b.safetensors", "both", 4, NULL);
	refused(folder(), -EBADMSG, "b.safetensors", "tensor \"both\" is also in a.safetensors",
		"index");
}

TEST(one_bad_file_of_many_is_named)
{
	write_tensors("a.safetensors", "x", 4, NULL);
	write_text("b.safetensors", "not at all");
	refused(folder(), -EBADMSG, "b.safetensors", "more than", "");
}

/* ---------------------------------------------------------------------------------- lists -- */

static void load_all(void);

static int open_list(size_t count, ...)
{
	const char *paths[8];
	va_list args;
	int rc;

	va_start(args, count);
	for (size_t i = 0; i < count; i++)
		paths[i] = va_arg(args, const char *);
	va_end(args);
	memset(&err, 0x55, sizeof(err));
	rc = pen_model_open_files(paths, count, &model, &err);
	CHECK(!rc == !!model);
	return rc;
}

TEST(listed_files_are_one_model_in_the_order_of_the_list)
{
	CHECK(!mkdir(in_scratch("other"), 0755));
	write_tensors("b.safetensors", "y", 4, "x", 4, NULL);
	write_tensors("other/b.safetensors", "z", 4, NULL);
	write_tensors("left_out.safetensors", "x", 4, NULL);
	CHECK(!chdir(folder()));
	CHECK_EQ(open_list(2, "other/b.safetensors", "b.safetensors"), 0);
	has_files("other/b.safetensors b.safetensors");
	has_tensors("z y x");
	CHECK_EQ(warnings(), 0);
	CHECK_EQ(pen_model_find(model, "x")->file, 1);
	/* It is of one place, wherever the process goes. */
	CHECK(!chdir("/"));
	for (size_t i = 0; i < 2; i++)
		CHECK_EQ(object_unchanged(model->files[i].object, &err), 0);
	load_all();
	pen_model_close(model);
}

TEST(a_tensor_in_two_listed_files_is_refused)
{
	write_tensors("a.safetensors", "x", 4, "both", 4, NULL);
	write_tensors("b.safetensors", "both", 4, NULL);
	CHECK(!chdir(folder()));
	CHECK_EQ(open_list(2, "b.safetensors", "a.safetensors"), -EBADMSG);
	CHECK(strstr(err.message, "tensor \"both\" is also in b.safetensors"));
	CHECK(!strcmp(err.object, "a.safetensors") && strstr(err.hint, "Leave one"));
	/* Nor can one be listed twice. */
	CHECK_EQ(open_list(2, "b.safetensors", "./b.safetensors"), -EBADMSG);
}

TEST(a_list_names_files_and_nothing_else)
{
	write_tensors("a.safetensors", "x", 4, NULL);
	CHECK(!chdir(folder()));
	CHECK_EQ(open_list(0), -EINVAL);
	CHECK(strstr(err.message, "no file is named"));
	CHECK_EQ(open_list(2, "a.safetensors", ""), -ENOENT);
	CHECK(strstr(err.message, "empty"));
	CHECK_EQ(open_list(2, "a.safetensors", "nowhere"), -ENOENT);
	CHECK(strstr(err.object, "nowhere"));
	CHECK_EQ(open_list(2, "a.safetensors", "."), -EISDIR);
	CHECK(strstr(err.hint, "Name a file in it"));
}

TEST(a_folder_with_nothing_says_what_was_looked_for)
{
	write_text("config.json", "{}");
	refused(folder(), -ENOENT, scratch, "no *.safetensors file and no *.safetensors.index.json",
		"Name the folder");
	CHECK(!mkdir(in_scratch("snapshots"), 0700));
	refused(folder(), -ENOENT, scratch, "no *.safetensors", "snapshots");
	write_text("pytorch_model-00001-of-00002.bin", "x");
	refused(folder(), -ENOENT, scratch, "no *.safetensors", "are of torch.save");
}

TEST(links_as_the_hugging_face_cache_has_them)
{
	CHECK(!mkdir(in_scratch("blobs"), 0700));
	CHECK(!mkdir(in_scratch("snapshots"), 0700));
	CHECK(!mkdir(in_scratch("snapshots/abc"), 0700));
	write_tensors("blobs/1234", "x", 4, NULL);
	write_tensors("blobs/5678", "y", 4, NULL);
	write_text("blobs/9abc", "{\"weight_map\":{\"x\":\"one.safetensors\","
				 "\"y\":\"two.safetensors\"}}");
	CHECK(!symlink("../../blobs/1234", in_scratch("snapshots/abc/one.safetensors")));
	CHECK(!symlink("../../blobs/5678", in_scratch("snapshots/abc/two.safetensors")));
	open_model(in_scratch("snapshots/abc"));
	has_files("one.safetensors two.safetensors");
	has_tensors("x y");
	pen_model_close(model);
	CHECK(!symlink("../../blobs/9abc", in_scratch("snapshots/abc/" INDEX)));
	open_model(in_scratch("snapshots/abc"));
	has_tensors("x y");
	pen_model_close(model);
	open_model(in_scratch("snapshots/abc/" INDEX));
	has_tensors("x y");
	pen_model_close(model);
	CHECK(!unlink(in_scratch("blobs/5678")));
	refused(in_scratch("snapshots/abc"), -ENOENT, "two.safetensors", "not there (file 2 of 2)",
		"incomplete");
}

/* ---------------------------------------------------------------------------------- index -- */

TEST(an_index_names_the_files)
{
	write_tensors("2.safetensors", "c", 4, "a", 4, NULL);
	write_tensors("1.safetensors", "d", 4, NULL);
	CHECK(!mkdir(in_scratch("sub"), 0700));
	write_tensors("sub/3.safetensors", "b", 4, NULL);
	write_text("unused.safetensors", "not even a model");
	write_text(INDEX, "{\"metadata\":{\"total_size\":16},\"weight_map\":{"
			  "\"a\":\"2.safetensors\",\"b\":\"./sub//3.safetensors\","
			  "\"c\":\"2.safetensors\",\"d\":\"1.safetensors\"},\"more\":[1]}");
	for (int way = 0; way < 3; way++) {
		char with_slash[600];

		snprintf(with_slash, sizeof(with_slash), "%s/", folder());
		open_model(way == 0 ? folder() : way == 1 ? with_slash : in_scratch(INDEX));
		has_files("1.safetensors 2.safetensors sub/3.safetensors");
		has_tensors("d c a b");
		/* Of the one that it does not name, where it is a folder that was opened. */
		CHECK_EQ(warnings(), way < 2);
		pen_model_close(model);
	}
	CHECK(!chdir(folder()));
	open_model(INDEX);
	has_tensors("d c a b");
	pen_model_close(model);
	open_model(".");
	has_tensors("d c a b");
	pen_model_close(model);
}

TEST(which_index_is_meant)
{
	write_tensors("1.safetensors", "a", 4, NULL);
	write_tensors("2.safetensors", "a", 4, NULL);
	write_text("other1.safetensors.index.json", "{\"weight_map\":{\"a\":\"2.safetensors\"}}");
	open_model(folder());
	has_files("2.safetensors");
	pen_model_close(model);
	write_text("other.safetensors.index.json", "{\"weight_map\":{\"a\":\"2.safetensors\"}}");
	refused(folder(), -EINVAL, scratch, "several indices", "Name the index");
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\"}}");
	write_text("z.safetensors.index.json", "{\"weight_map\":{\"a\":\"2.safetensors\"}}");
	open_model(folder());
	has_files("1.safetensors");
	pen_model_close(model);
}

TEST(a_missing_shard_is_named)
{
	write_tensors("1.safetensors", "a", 4, NULL);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	refused(folder(), -ENOENT, "2.safetensors", INDEX " names it, and it is not there",
		"incomplete");
}

TEST(a_listed_tensor_must_be_in_its_file)
{
	write_tensors("1.safetensors", "a", 4, "m", 4, NULL);
	write_tensors("2.safetensors", "b", 4, NULL);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"m\":\"2.safetensors\"}}");
	refused(folder(), -EBADMSG, INDEX, "tensor \"m\" is listed for 2.safetensors, which does",
		"1.safetensors has it");
	/* Before all others, between them and after them in the alphabet. */
	write_text(INDEX, "{\"weight_map\":{\"A\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	refused(folder(), -EBADMSG, INDEX, "tensor \"A\" is listed", "other files");
	write_text(INDEX, "{\"weight_map\":{\"aa\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	refused(folder(), -EBADMSG, INDEX, "tensor \"aa\" is listed", "other files");
	write_text(INDEX, "{\"weight_map\":{\"z\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	refused(folder(), -EBADMSG, INDEX, "tensor \"z\" is listed", "other files");
}

TEST(a_tensor_that_is_not_listed_comes_with_a_warning)
{
	write_tensors("1.safetensors", "a", 4, "extra", 4, NULL);
	write_tensors("2.safetensors", "b", 4, "more", 4, "most", 4, NULL);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	open_model(folder());
	has_tensors("a extra b more most");
	CHECK_EQ(warnings(), 2);
	CHECK_TEXT(warning(0), "tensor \"extra\" is in 1.safetensors but not listed in the index");
	CHECK_TEXT(warning(1), "2 tensors (\"more\" ...) are in 2.safetensors but not listed in "
			       "the index");
	pen_model_close(model);
}

TEST(the_index_decides_between_two)
{
	write_tensors("1.safetensors", "a", 4, "x", 4, NULL);
	write_tensors("2.safetensors", "b", 4, "a", 8, "x", 8, NULL);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\","
			  "\"x\":\"2.safetensors\"}}");
	open_model(folder());
	has_tensors("a b x");
	CHECK_EQ(pen_model_find(model, "a")->bytes, 4);
	CHECK_EQ(pen_model_find(model, "x")->bytes, 8);
	CHECK_EQ(warnings(), 2);
	CHECK_TEXT(warning(0), "tensor \"x\" is in 1.safetensors too, but taken from 2.safetensors "
			       "as the index says");
	CHECK_TEXT(warning(1), "tensor \"a\" is in 2.safetensors too, but taken from 1.safetensors "
			       "as the index says");
	pen_model_close(model);
	/* Where the index does not tell, nobody does. */
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	refused(folder(), -EBADMSG, "2.safetensors", "tensor \"x\" is also in 1.safetensors", "");
}

static void bad_index(const char *text, const char *words)
{
	struct index *index;
	int rc;

	rc = index_parse("index", text, strlen(text), &index, &err);
	if (rc != -EBADMSG || !strstr(err.message, words))
		fprintf(stderr, "%s: %s\n", text, rc ? err.message : "taken");
	CHECK_EQ(rc, -EBADMSG);
	CHECK(!index && strstr(err.message, words));
	CHECK_EQ(err.domain, PEN_DOMAIN_FORMAT);
	CHECK(err.hint[0]);
	CHECK_EQ(index_parse("index", text, strlen(text), &index, NULL), -EBADMSG);
}

/* As every reader of JSON has it that makes a mapping of an object. */
TEST(of_what_an_index_lists_twice_the_last_counts)
{
	const char *text = "{\"weight_map\":{\"z\":\"never\"},\"more\":[{}],"
			   "\"weight_map\":{\"b\":\"2\",\"a\":\"gone\",\"\\u0061\":\"./1\","
			   "\"a\\u0000\":\"2\"}}";
	struct index *index;

	CHECK_EQ(index_parse("index", text, strlen(text), &index, &err), 0);
	CHECK_EQ(index->count, 3);
	CHECK_EQ(index->file_count, 2);
	CHECK_TEXT(index->files[0], "1");
	CHECK_TEXT(index->files[1], "2");
	CHECK_TEXT(index->entries[0].tensor, "a");
	CHECK_EQ(index->entries[0].file, 0);
	CHECK_EQ(index->entries[1].length, 2);
	CHECK(!memcmp(index->entries[1].tensor, "a\0", 3));
	CHECK_EQ(index->entries[1].file, 1);
	CHECK_TEXT(index->entries[2].tensor, "b");
	free(index);
}

TEST(a_bad_index_is_refused)
{
	static const char *const climbing[] = { "/etc/x", "../x", "a/../x", "a/..", "..", "./../x",
						"a/b/../../..", "//x" };

	bad_index("", "in the middle");
	bad_index("[]", "not a JSON object");
	bad_index("{}", "has no \"weight_map\"");
	bad_index("{\"weight_map\":[]}", "is not a JSON object");
	bad_index("{\"weight_map\":{}}", "the index lists no tensors");
	bad_index("{\"weight_map\":null}", "is not a JSON object");
	bad_index("{\"weight_map\":{\"a\":1}}", "file of tensor \"a\" is not given as a text");
	bad_index("{\"weight_map\":{\"a\":\"\"}}", "which is no name");
	bad_index("{\"weight_map\":{\"a\":\".\"}}", "not inside");
	bad_index("{\"weight_map\":{\"a\":\"x\"},\"weight_map\":{}}", "the index lists no tensors");
	bad_index("{\"weight_map\":{\"a\":\"x\\u0000\"}}",
		  "\"x\xe2\x90\x80\", which is not inside");
	bad_index("{\"weight_map\":{\"a\":\"x\"},\"more\":[1,}", "not valid JSON");
	bad_index("{\"weight_map\":{\"a\":\"x\"}} x", "not valid JSON: the end");
	bad_index("{\"weight_map\":{\"\xff\":\"x\"}}", "UTF-8");
	for (size_t i = 0; i < sizeof(climbing) / sizeof(climbing[0]); i++) {
		char text[100];

		snprintf(text, sizeof(text), "{\"weight_map\":{\"ok\":\"x\",\"a\":\"%s\"}}",
			 climbing[i]);
		bad_index(text, "not inside the folder of the index");
		CHECK_EQ(err.offset, 24);
	}
	/* Dots are not all the same. */
	write_tensors("..a.safetensors", "a", 4, NULL);
	open_model(write_text("i.json", "{\"weight_map\":{\"a\":\"..a.safetensors\"}}"));
	has_files("..a.safetensors");
	pen_model_close(model);
	refused(write_text("config.json", "{\"hidden\":1}"), -EBADMSG, "config.json",
		"has no \"weight_map\"", "Name a folder");
	write_text(INDEX, "{\"metadata\":{}}");
	refused(folder(), -EBADMSG, INDEX, "has no \"weight_map\"", "The index is damaged");
}

/* ----------------------------------------------------------------------------- many shards -- */

#define SHARDS 2000

static void write_shards(unsigned int count)
{
	char *text = malloc(100 * count + 100), *at = text;

	CHECK(text != NULL);
	at += sprintf(at, "{\"weight_map\":{");
	for (unsigned int i = 0; i < count; i++) {
		char name[40], tensor[40];

		sprintf(name, "model-%05u.safetensors", i);
		sprintf(tensor, "layer.%u", i * 7 % count);
		write_tensors(name, tensor, 3 + i % 5, NULL);
		at += sprintf(at, "%s\"%s\":\"%s\"", i ? "," : "", tensor, name);
	}
	strcpy(at, "}}");
	write_text(INDEX, text);
	free(text);
}

static int go_elsewhere(const char *name)
{
	if (!strcmp(name, "stat"))
		CHECK(!chdir("/"));
	return 0;
}

TEST(a_model_is_of_one_place_wherever_the_process_goes)
{
	write_shards(3);
	CHECK(!chdir(folder()));
	sys_fault_hook = go_elsewhere;
	open_model(".");
	sys_fault_hook = NULL;
	CHECK_EQ(model->file_count, 3);
	for (size_t i = 0; i < 3; i++)
		CHECK_EQ(object_unchanged(model->files[i].object, &err), 0);
	pen_model_close(model);
}

static void check_bytes(const struct pen_tensor *tensor, const unsigned char *bytes)
{
	for (uint64_t i = 0; i < tensor->bytes; i++)
		CHECK_EQ(bytes[i], byte_at(tensor->offset + i));
}

/* All tensors in one job, into memory that the job allocates; every byte is looked at. */
static void load_all(void)
{
	const struct pen_tensor *tensors;
	size_t count = pen_model_tensors(model, &tensors);
	struct pen_placement *places = calloc(count + 1, sizeof(*places));
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_device *host;
	struct pen_job *job;
	void *memory = NULL;
	uint64_t total;

	CHECK(places != NULL);
	for (size_t i = 0; i < count; i++)
		places[i].tensor = &tensors[i];
	CHECK_EQ(pen_placement_layout(places, count, &total, &err), 0);
	options.allocate = total;
	options.allocated = &memory;
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK_EQ(pen_load_start(model, host, places, count, &options, &job, &err), 0);
	CHECK_EQ(pen_job_wait(job, NULL, &err), 0);
	for (size_t i = 0; i < count; i++)
		check_bytes(&tensors[i], (unsigned char *)memory + (uintptr_t)places[i].memory);
	CHECK_EQ(pen_device_free(host, memory, total, &err), 0);
	pen_device_close(host);
	free(places);
}

TEST(thousands_of_shards)
{
	struct rlimit limit;

	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	if (limit.rlim_max < 3 * SHARDS + 100)
		SKIP("the limit of open files is too low for thousands of shards");
	limit.rlim_cur = limit.rlim_max;
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	write_shards(SHARDS);
	open_model(folder());
	CHECK_EQ(pen_model_files(model, NULL), SHARDS);
	CHECK_EQ(pen_model_tensors(model, NULL), SHARDS);
	CHECK_EQ(warnings(), 0);
	load_all();
	pen_model_close(model);
	CHECK(!unlink(in_scratch(INDEX)));
	open_model(folder());
	CHECK_EQ(pen_model_files(model, NULL), SHARDS);
	pen_model_close(model);
}

TEST(too_many_open_files_come_with_advice)
{
	struct rlimit limit;

	write_shards(60);
	CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = entries_in("/proc/self/fd") + 20;
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	refused(folder(), -EMFILE, ".safetensors", "Too many open files", "ulimit -n");
}

/* ----------------------------------------------------------------------------- placements -- */

TEST(layout_aligns_each_tensor)
{
	const struct pen_tensor *tensors;
	struct pen_placement places[4] = { 0 };
	uint64_t total;

	open_model(write_tensors("x.safetensors", "a", 1, "b", 0, "c", 256, "d", 257, NULL));
	CHECK_EQ(pen_model_tensors(model, &tensors), 4);
	for (int i = 0; i < 4; i++)
		places[i].tensor = &tensors[(i + 3) % 4];	/* d, a, b (empty), c */
	CHECK_TEXT(tensors[1].name, "b");
	CHECK_EQ(pen_placement_layout(places, 4, &total, &err), 0);
	CHECK_EQ((uintptr_t)places[0].memory, 0);
	CHECK_EQ((uintptr_t)places[1].memory, 512);
	CHECK_EQ((uintptr_t)places[2].memory, 768);
	CHECK_EQ((uintptr_t)places[3].memory, 768);
	CHECK_EQ(total, 768 + 256);
	CHECK_EQ(pen_placement_layout(NULL, 0, &total, &err), 0);
	CHECK_EQ(total, 0);
	pen_model_close(model);
}

TEST(sizes_beyond_memory_are_refused)
{
	uint64_t huge[] = { UINT64_MAX / 2, 1 }, wide[] = { UINT64_MAX / 2, 3 };
	struct pen_tensor tensor = { .name = "t", .dtype = PEN_U8, .rank = 2, .shape = huge };
	struct pen_placement places[3] = { { &tensor }, { &tensor }, { &tensor } };
	uint64_t total, bytes;

	CHECK_EQ(pen_placement_layout(places, 3, &total, &err), -EINVAL);
	CHECK(strstr(err.message, "larger than any memory") && err.hint[0]);
	tensor.shape = wide;
	CHECK_EQ(pen_placement_bytes(places, &bytes, &err), -EINVAL);
	CHECK(strstr(err.message, "larger than 64 bits"));
	tensor.shape = huge;
	tensor.dtype = PEN_F64;
	CHECK_EQ(pen_placement_bytes(places, &bytes, &err), -EINVAL);
}

TEST(boxes_must_lie_in_the_tensor)
{
	uint64_t shape[] = { 4, 6 }, start[] = { 0, 0 }, stop[] = { 4, 6 }, bytes;
	struct pen_tensor tensor = {
		.name = "t", .dtype = PEN_BF16, .rank = 2, .shape = shape, .bytes = 48,
	};
	struct pen_placement place = { .tensor = &tensor, .start = start, .stop = stop };

	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), 0);
	CHECK_EQ(bytes, 48);
	stop[1] = 7;
	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), -EINVAL);
	CHECK_EQ(bytes, 0);
	CHECK(strstr(err.message, "from 0 to 7 in dimension 1 of size 6"));
	CHECK_TEXT(err.object, "t");
	CHECK(err.hint[0]);
	stop[1] = 2;
	start[1] = 3;
	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), -EINVAL);
	CHECK(strstr(err.message, "from 3 to 2 in dimension 1"));
	stop[1] = 3;
	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), 0);
	CHECK_EQ(bytes, 0);
	place.stop = NULL;
	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), -EINVAL);
	CHECK(strstr(err.message, "but not both"));
	place.tensor = NULL;
	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), -EINVAL);
	place = (struct pen_placement){ .tensor = &tensor };
	tensor.dtype = PEN_DTYPES;
	CHECK_EQ(pen_placement_bytes(&place, &bytes, NULL), -EINVAL);
}

TEST(boxes_of_half_bytes)
{
	uint64_t shape[] = { 4, 6 }, bytes;
	struct pen_tensor tensor = {
		.name = "t", .dtype = PEN_F4, .rank = 2, .shape = shape, .bytes = 12,
	};
	struct pen_placement place = {
		.tensor = &tensor, .start = (uint64_t[]){ 0, 2 }, .stop = (uint64_t[]){ 4, 4 },
	};

	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), 0);
	CHECK_EQ(bytes, 4);
	place.start = (uint64_t[]){ 0, 1 };
	CHECK_EQ(pen_placement_bytes(&place, &bytes, &err), -EINVAL);
	CHECK(strstr(err.message, "cuts a byte in two: F4 has 4 bits"));
	CHECK(strstr(err.hint, "whole bytes"));
}

TEST(placements_of_another_model_are_refused)
{
	struct pen_placement place = { .memory = &place };
	struct pen_tensor tensor;
	struct pen_device *host;
	struct pen_job *job;

	open_model(write_tensors("x.safetensors", "a", 10, NULL));
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	tensor = *pen_model_find(model, "a");
	place.tensor = &tensor;
	tensor.file = 1;
	CHECK_EQ(pen_load_start(model, host, &place, 1, NULL, &job, &err), -EINVAL);
	CHECK(strstr(err.message, "no file 1") && !job);
	tensor.file = 0;
	tensor.offset += 1;
	CHECK_EQ(pen_load_start(model, host, &place, 1, NULL, &job, &err), -EINVAL);
	CHECK(strstr(err.message, "does not lie in x.safetensors"));
	tensor.offset = UINT64_MAX;
	CHECK_EQ(pen_load_start(model, host, &place, 1, NULL, &job, &err), -EINVAL);
	place.tensor = NULL;
	CHECK_EQ(pen_load_start(model, host, &place, 1, NULL, &job, NULL), -EINVAL);
	pen_device_close(host);
	pen_model_close(model);
}

static size_t extents_of(const uint64_t *shape, uint32_t rank, const uint64_t *start,
			 const uint64_t *stop, struct pen_extent *first)
{
	struct pen_tensor tensor = {
		.name = "t", .dtype = PEN_F32, .rank = rank, .shape = shape, .bytes = 4,
	};
	struct pen_placement place = { .tensor = &tensor, .start = start, .stop = stop };
	struct pen_model_file file = { .name = "f", .size = 4 };
	struct pen_model fake = { .files = &file, .file_count = 1 };
	struct pen_extent *extents;
	size_t count;

	CHECK_EQ(load_extents(&fake, &place, 1, &extents, &count, &err), 0);
	if (count)
		*first = extents[0];
	free(extents);
	return count;
}

#define EXTENTS(shape, start, stop, first)                                           \
	extents_of((uint64_t[])shape, sizeof((uint64_t[])shape) / sizeof(uint64_t),  \
		   (uint64_t[])start, (uint64_t[])stop, first)
#define SET(...) { __VA_ARGS__ }

TEST(boxes_become_few_extents)
{
	struct pen_extent e;

	/* All of it, or whole rows: one stretch. */
	CHECK_EQ(EXTENTS(SET(10, 20, 30), SET(0, 0, 0), SET(10, 20, 30), &e), 1);
	CHECK(e.length == 24000 && e.rows <= 1 && e.offset == 0);
	CHECK_EQ(EXTENTS(SET(10, 20, 30), SET(2, 0, 0), SET(5, 20, 30), &e), 1);
	CHECK(e.length == 3 * 2400 && e.rows <= 1 && e.offset == 2 * 2400);
	/* Inside one step of the outer dimension. */
	CHECK_EQ(EXTENTS(SET(10, 20, 30), SET(2, 3, 0), SET(3, 9, 30), &e), 1);
	CHECK(e.length == 6 * 120 && e.rows <= 1 && e.offset == 2 * 2400 + 3 * 120);
	/* Columns: one strided extent, whatever lies outside. */
	CHECK_EQ(EXTENTS(SET(10, 20, 30), SET(0, 0, 5), SET(10, 20, 15), &e), 1);
	CHECK(e.length == 40 && e.rows == 200 && e.object_pitch == 120 && e.memory_pitch == 40);
	CHECK_EQ(EXTENTS(SET(10, 20, 30), SET(0, 5, 0), SET(10, 15, 30), &e), 1);
	CHECK(e.length == 1200 && e.rows == 10 && e.object_pitch == 2400 && e.memory_pitch == 1200);
	CHECK_EQ(EXTENTS(SET(10, 20, 30), SET(0, 5, 7), SET(10, 6, 8), &e), 1);
	CHECK(e.length == 4 && e.rows == 10 && e.object_pitch == 2400 && e.memory_pitch == 4);
	CHECK_EQ(EXTENTS(SET(10, 20, 1, 30), SET(0, 0, 0, 5), SET(10, 20, 1, 15), &e), 1);
	CHECK_EQ(e.rows, 200);
	/* A true box: the longer loop is the rows. */
	CHECK_EQ(EXTENTS(SET(10, 20, 30), SET(0, 3, 5), SET(2, 20, 15), &e), 2);
	CHECK(e.rows == 17 && e.object_pitch == 120 && e.memory_pitch == 40);
	CHECK_EQ(EXTENTS(SET(100000, 3, 16), SET(0, 0, 0), SET(100000, 2, 8), &e), 2);
	CHECK(e.rows == 100000 && e.object_pitch == 192 && e.memory_pitch == 64);
	/* Nothing is nothing, also where the rest of the shape could not be counted. */
	CHECK_EQ(EXTENTS(SET(10, 20), SET(3, 0), SET(3, 20), &e), 0);
	CHECK_EQ(EXTENTS(SET(0, UINT64_MAX, UINT64_MAX), SET(0, 0, 0),
			 SET(0, UINT64_MAX, UINT64_MAX), &e), 0);
}

TEST(extents_carry_the_number_and_the_device_of_their_placement)
{
	struct pen_placement places[3] = { 0 };
	struct pen_extent *extents;
	struct pen_device *host;
	size_t count;

	open_model(write_tensors("x.safetensors", "a", 10, "b", 0, "c", 20, NULL));
	for (int i = 0; i < 3; i++)
		places[i].tensor = &model->tensors[i];
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	places[2].device = host;
	CHECK_EQ(load_extents(model, places, 3, &extents, &count, &err), 0);
	CHECK_EQ(count, 2);
	CHECK(!extents[0].device && extents[1].device == host);
	CHECK(extents[0].group == 0 && extents[0].length == 10);
	CHECK(extents[1].group == 2 && extents[1].length == 20);
	CHECK(extents[0].object == model->files[0].object);
	free(extents);
	pen_device_close(host);
	pen_model_close(model);
}

/* ---------------------------------------------------------------------------------- boxes -- */

#define RANKS 6
#define KINDS 5
static const int kinds[KINDS] = { PEN_U8, PEN_BF16, PEN_F64, PEN_F4, PEN_F6_E2M3 };

static uint64_t seed = 1;

static uint64_t chance(uint64_t below)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (seed >> 33) % below;
}

/* A file with three tensors of each rank and kind, from scalars to five dimensions. */
static void write_boxes(void)
{
	char header[20000] = "{";
	size_t at = 1, data = 0, count = 0;

	for (int kind = 0; kind < KINDS; kind++)
		for (int rank = 0; rank < RANKS; rank++)
			for (int n = 0; n < 3; n++) {
				uint64_t elements = 1, bytes;
				char shape[100] = "";

				for (int d = 0; d < rank; d++) {
					/* The last makes whole bytes of any kind. */
					uint64_t size = d == rank - 1 && kind > 2
							? 4 + 4 * chance(3) : 1 + chance(6);

					sprintf(shape + strlen(shape), "%s%u", d ? "," : "",
						(unsigned int)size);
					elements *= size;
				}
				bytes = elements * pen_dtype_bits(kinds[kind]) / 8;
				if (elements * pen_dtype_bits(kinds[kind]) % 8)
					continue;
				at += (size_t)sprintf(header + at, "%s\"t%zu\":{\"dtype\":\"%s\","
						      "\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
						      count ? "," : "", count,
						      pen_dtype_name(kinds[kind]), shape, data,
						      data + (size_t)bytes);
				data += bytes;
				count++;
			}
	strcpy(header + at, "}");
	open_model(write_model("boxes.safetensors", header, data));
	CHECK(pen_model_tensors(model, NULL) == count && count > 70);
}

struct box {
	uint64_t start[RANKS], stop[RANKS];
};

static void random_box(const struct pen_tensor *tensor, struct box *box)
{
	for (uint32_t d = 0; d < tensor->rank; d++) {
		uint64_t size = tensor->shape[d];

		box->start[d] = chance(3) ? chance(size + 1) : 0;
		box->stop[d] = box->start[d] + chance(size - box->start[d] + 1);
		if (!chance(3)) {
			box->start[d] = 0;
			box->stop[d] = size;
		}
	}
}

static unsigned int bit_of_file(uint64_t bit)
{
	return byte_at(bit / 8) >> (bit % 8) & 1;
}

/*
 * The box, one bit after the other. False if its bytes are not bytes of the file: then a copy of
 * bytes cannot make it.
 */
static bool reference(const struct pen_tensor *tensor, const struct box *box, unsigned char *out,
		      uint64_t *bytes)
{
	uint64_t index[RANKS], bits = pen_dtype_bits(tensor->dtype), done = 0;
	uint64_t wanted = bits;
	bool whole = true;

	for (uint32_t d = 0; d < tensor->rank; d++) {
		index[d] = box->start[d];
		wanted *= box->stop[d] - box->start[d];
	}
	*bytes = wanted / 8;
	memset(out, 0, *bytes + 1);
	while (done < wanted) {
		uint64_t element = 0;

		for (uint32_t d = 0; d < tensor->rank; d++)
			element = element * tensor->shape[d] + index[d];
		for (uint64_t b = 0; b < bits; b++, done++) {
			uint64_t from = tensor->offset * 8 + element * bits + b;

			whole &= from % 8 == done % 8;
			out[done / 8] |= (unsigned char)(bit_of_file(from) << (done % 8));
		}
		for (uint32_t d = tensor->rank; d-- > 0;) {
			if (++index[d] < box->stop[d])
				break;
			index[d] = box->start[d];
		}
	}
	return whole && wanted % 8 == 0;
}

#define BOX_ROOM (64u << 10)
static unsigned char wanted[BOX_ROOM], got[BOX_ROOM];
static bool written[BOX_ROOM];

/* Do what the extents say to bytes in memory. */
static void run_extents(const struct pen_extent *extents, size_t count)
{
	memset(got, 0, sizeof(got));
	memset(written, 0, sizeof(written));
	for (size_t i = 0; i < count; i++)
		for (uint64_t row = 0; row < (extents[i].rows ? extents[i].rows : 1); row++)
			for (uint64_t b = 0; b < extents[i].length; b++) {
				uint64_t at = (uintptr_t)extents[i].memory + b +
					      row * extents[i].memory_pitch;

				CHECK(at < sizeof(got) && !written[at]);
				written[at] = true;
				got[at] = byte_at(extents[i].offset + b +
						  row * extents[i].object_pitch);
			}
}

TEST(random_boxes_as_extents)
{
	const struct pen_tensor *tensors;
	unsigned int taken = 0, refusals = 0;
	size_t count;

	write_boxes();
	count = pen_model_tensors(model, &tensors);
	for (unsigned int n = 0; n < (TEST_SLOW_BUILD ? 3000 : 20000); n++) {
		const struct pen_tensor *tensor = &tensors[chance(count)];
		struct box box;
		struct pen_placement place = {
			.tensor = tensor, .start = box.start, .stop = box.stop,
		};
		struct pen_extent *extents;
		uint64_t bytes, said;
		size_t extent_count;

		random_box(tensor, &box);
		if (!reference(tensor, &box, wanted, &bytes)) {
			CHECK_EQ(pen_placement_bytes(&place, &said, &err), -EINVAL);
			CHECK_EQ(load_extents(model, &place, 1, &extents, &extent_count, &err),
				 -EINVAL);
			refusals++;
			continue;
		}
		CHECK_EQ(pen_placement_bytes(&place, &said, &err), 0);
		CHECK_EQ(said, bytes);
		CHECK_EQ(load_extents(model, &place, 1, &extents, &extent_count, &err), 0);
		CHECK_EQ(!extent_count, !bytes);
		run_extents(extents, extent_count);
		CHECK(!memcmp(got, wanted, bytes + 1));
		free(extents);
		taken++;
	}
	printf("%u boxes taken, %u refused\n", taken, refusals);
	CHECK(taken > 500 && refusals > 100);
	pen_model_close(model);
}

#define AT_ONCE 200

/* Many boxes in one job, through the engine, with tags. */
static void load_boxes(struct pen_device *host)
{
	static struct box boxes[AT_ONCE];
	static struct pen_placement places[AT_ONCE];
	static bool told[AT_ONCE];
	struct pen_options options = PEN_OPTIONS_INIT;
	const struct pen_tensor *tensors;
	size_t count = pen_model_tensors(model, &tensors), made = 0, landed = 0;
	uint64_t total, bytes, tags[16];
	struct pen_job *job;
	void *memory;

	while (made < AT_ONCE) {
		const struct pen_tensor *tensor = &tensors[chance(count)];

		random_box(tensor, &boxes[made]);
		places[made] = (struct pen_placement){
			.tensor = tensor, .start = boxes[made].start, .stop = boxes[made].stop,
		};
		made += reference(tensor, &boxes[made], wanted, &bytes);
	}
	memset(told, 0, sizeof(told));
	CHECK_EQ(pen_placement_layout(places, made, &total, &err), 0);
	CHECK(total > 0);
	options.allocate = total;
	options.allocated = &memory;
	options.groups = made;
	CHECK_EQ(pen_load_start(model, host, places, made, &options, &job, &err), 0);
	for (size_t n; (n = pen_job_landed(job, tags, 16, 60)) > 0; landed += n)
		for (size_t i = 0; i < n; i++) {
			CHECK(tags[i] < made && !told[tags[i]]);
			told[tags[i]] = true;
		}
	CHECK_EQ(landed, made);
	CHECK_EQ(pen_job_wait(job, NULL, &err), 0);
	for (size_t i = 0; i < made; i++) {
		reference(places[i].tensor, &boxes[i], wanted, &bytes);
		CHECK(!memcmp((char *)memory + (uintptr_t)places[i].memory, wanted, bytes));
	}
	CHECK_EQ(pen_device_free(host, memory, total, &err), 0);
}

TEST(random_boxes_through_the_engine)
{
	struct pen_device *host;

	write_boxes();
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	for (int n = 0; n < (TEST_SLOW_BUILD ? 5 : 40); n++)
		load_boxes(host);
	pen_device_close(host);
	pen_model_close(model);
}

TEST(boxes_into_memory_of_the_callers)
{
	const struct pen_tensor *tensor;
	struct pen_placement place;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *host;
	struct pen_job *job;
	unsigned char memory[64];

	open_model(write_model("x.safetensors",
			       "{\"a\":{\"dtype\":\"U8\",\"shape\":[4,8],\"data_offsets\":[0,32]}}",
			       32));
	tensor = pen_model_find(model, "a");
	place = (struct pen_placement){
		.tensor = tensor, .start = (uint64_t[]){ 1, 2 }, .stop = (uint64_t[]){ 3, 7 },
		.memory = memory + 1,
	};
	memset(memory, 0x77, sizeof(memory));
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK_EQ(pen_load_start(model, host, &place, 1, NULL, &job, &err), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(report.bytes, 10);
	for (int i = 0; i < 64; i++)
		CHECK_EQ(memory[i], i < 1 || i > 10 ? 0x77 : byte_at(tensor->offset +
			 8 * (1 + (uint64_t)(i - 1) / 5) + 2 + (uint64_t)(i - 1) % 5));
	/* Nothing at all is loaded without complaint. */
	CHECK_EQ(pen_load_start(model, host, NULL, 0, NULL, &job, &err), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(report.bytes, 0);
	pen_device_close(host);
	pen_model_close(model);
}

TEST(all_of_a_model_of_several_files)
{
	write_tensors("1.safetensors", "a", 70001, "empty", 0, "b", 12345, NULL);
	write_tensors("2.safetensors", "c", 300000, NULL);
	write_tensors("3.safetensors", "nothing", 0, NULL);
	open_model(folder());
	load_all();
	pen_model_close(model);
}

TEST(a_file_that_changes_before_it_is_loaded_is_named)
{
	static unsigned char memory[100000];
	struct pen_placement place = { .memory = memory };
	struct pen_device *host;
	struct pen_job *job;
	const char *path = write_tensors("x.safetensors", "a", 100000, NULL);
	int rc;

	open_model(path);
	place.tensor = pen_model_find(model, "a");
	CHECK(!truncate(path, 5000));
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	rc = pen_load_start(model, host, &place, 1, NULL, &job, &err);
	if (!rc)
		rc = pen_job_wait(job, NULL, &err);
	CHECK(rc < 0);
	CHECK(strstr(err.object, "x.safetensors") && err.message[0]);
	pen_device_close(host);
	pen_model_close(model);
}

/* ------------------------------------------------------------------------- failing calls -- */

static struct {
	unsigned int calls, k;
	bool for_good;
	int code;
} fault;

static int fail_kth(const char *name)
{
	(void)name;
	fault.calls++;
	return fault.k && (fault.for_good ? fault.calls >= fault.k : fault.calls == fault.k)
		? fault.code : 0;
}

static int open_folder(void)
{
	return pen_model_open(folder(), &model, &err);
}

static int open_both(void)
{
	return open_list(2, "1.safetensors", "2.safetensors");
}

/* Open with the k-th call failing; is k beyond the last call? */
static bool open_with_fault(int (*open)(void), const char *tensors, unsigned int k, bool for_good)
{
	static const int codes[] = { EIO, ENOMEM, EMFILE, EACCES };
	unsigned int before = entries_in("/proc/self/fd");
	int rc;

	fault.calls = 0;
	fault.k = k;
	fault.for_good = for_good;
	fault.code = codes[k % 4];
	memset(&err, 0x55, sizeof(err));
	sys_fault_hook = fail_kth;
	rc = open();
	sys_fault_hook = NULL;
	if (rc) {
		CHECK(!model && rc < 0 && err.code == rc);
		CHECK(err.message[0] && err.operation[0]);
	} else {
		has_tensors(tensors);
	}
	fault.k = 0;
	pen_model_close(model);
	CHECK_EQ(entries_in("/proc/self/fd"), before);
	return fault.calls < k;
}

static void fail_every_call(int (*open)(void), const char *tensors)
{
	for (int for_good = 0; for_good < 2; for_good++) {
		unsigned int k = 1;

		while (!open_with_fault(open, tensors, k, for_good))
			k++;
		printf("%u calls\n", k);
		CHECK(k > 30);
	}
}

TEST(every_call_of_opening_may_fail)
{
	write_tensors("1.safetensors", "a", 4, "extra", 4, NULL);
	write_tensors("2.safetensors", "a", 4, "b", 4, NULL);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	fail_every_call(open_folder, "a extra b");
}

TEST(every_call_of_opening_a_list_may_fail)
{
	write_tensors("1.safetensors", "a", 4, "c", 4, NULL);
	write_tensors("2.safetensors", "b", 4, NULL);
	CHECK(!chdir(folder()));
	fail_every_call(open_both, "a c b");
}

TEST(every_call_of_loading_may_fail)
{
	static unsigned char memory[5][4096];
	struct pen_placement places[5];
	struct pen_device *host;
	struct pen_job *job;

	write_boxes();
	for (int i = 0; i < 5; i++)
		places[i] = (struct pen_placement){
			.tensor = &model->tensors[i * 10], .memory = memory[i],
		};
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	for (unsigned int k = 1; ; k++) {
		int rc;

		fault.calls = 0;
		fault.k = k;
		fault.code = ENOMEM;
		sys_fault_hook = fail_kth;
		rc = pen_load_start(model, host, places, 5, NULL, &job, &err);
		if (rc)
			CHECK(!job);
		else
			rc = pen_job_wait(job, NULL, &err);
		sys_fault_hook = NULL;
		if (rc)
			CHECK(err.code == rc && err.message[0]);
		for (int i = 0; i < 5 && !rc; i++)
			check_bytes(places[i].tensor, memory[i]);
		if (fault.calls < k)
			break;
		CHECK(k < 1000);
	}
	pen_device_close(host);
	pen_model_close(model);
	pen_trim();
}

TEST(a_placement_goes_to_the_device_that_it_names)
{
	struct pen_placement place;
	struct pen_device *host, *gpu;
	struct pen_job *job;
	unsigned char memory[32];

	NEED_FAKE_GPU();
	open_model(write_tensors("x.safetensors", "a", 32, NULL));
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	place = (struct pen_placement){ .tensor = pen_model_find(model, "a"), .memory = memory,
					.device = host };
	CHECK_EQ(pen_load_start(model, gpu, &place, 1, NULL, &job, &err), 0);
	CHECK_EQ(pen_job_wait(job, NULL, &err), 0);
	for (uint64_t i = 0; i < 32; i++)
		CHECK_EQ(memory[i], byte_at(place.tensor->offset + i));
	pen_device_close(host);
	pen_device_close(gpu);
	pen_model_close(model);
}

TEST(a_box_is_loaded_in_another_dtype)
{
	uint64_t start[] = { 1, 2, 1 }, stop[] = { 3, 4, 3 }, total;
	struct pen_placement places[2];
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *host;
	struct pen_job *job;
	uint32_t memory[256 / 4 + 60];

	open_model(write_model("x.safetensors",
			       "{\"a\":{\"dtype\":\"BF16\",\"shape\":[3,5,4],"
			       "\"data_offsets\":[0,120]}}   ", 120));
	places[0] = (struct pen_placement){ .tensor = pen_model_find(model, "a"), .start = start,
					    .stop = stop, .form = PEN_FORM_BF16_TO_F32 };
	places[1] = (struct pen_placement){ .tensor = places[0].tensor,
					    .form = PEN_FORM_BF16_TO_F32 };
	CHECK_EQ(places[0].tensor->offset % 2, 0);
	CHECK_EQ(pen_placement_layout(places, 2, &total, &err), 0);
	CHECK_EQ(total, 256 + 240);
	for (int i = 0; i < 2; i++)
		places[i].memory = (char *)memory + (uintptr_t)places[i].memory;
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK_EQ(pen_load_start(model, host, places, 2, NULL, &job, &err), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(report.bytes, 16 + 120);
	CHECK_EQ(report.delivered_bytes, 32 + 240);
	for (uint64_t i = 0; i < 60; i++) {
		uint64_t at = places[0].tensor->offset + 2 * i;
		uint64_t x = i / 20, y = i / 4 % 5, z = i % 4;
		uint32_t bits = (uint32_t)byte_at(at) << 16 | (uint32_t)byte_at(at + 1) << 24;

		CHECK_EQ(memory[64 + i], bits);
		if (x >= 1 && y >= 2 && y < 4 && z >= 1 && z < 3)
			CHECK_EQ(memory[(x - 1) * 4 + (y - 2) * 2 + z - 1], bits);
	}
	places[0].form = PEN_FORM_F16_TO_F32;
	CHECK_EQ(pen_load_start(model, host, places, 1, NULL, &job, &err), -EINVAL);
	CHECK(strstr(err.message, "none of BF16"));
	pen_device_close(host);
	pen_model_close(model);
}

TEST_MAIN

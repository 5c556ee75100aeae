/* SPDX-License-Identifier: MIT */
/* Manifests: what is right is read back as it was, and each way to be wrong has its words. */
#include <errno.h>
#include "format/manifest.h"
#include "test.h"

#define HEAD "\"format\": \"penstock-checkpoint\", \"version\": 1, \"step\": 7, "
#define TIME "\"time\": \"2026-11-17T02:30:00Z\", "
#define DIGEST "\"digest\": \"xxh3:0123456789abcdef\""
#define FILE_0 "{\"name\": \"rank-00000.pt\", \"bytes\": 5, \"tensors\": 2, " DIGEST "}"
#define FILE_1 "{\"name\": \"rank-00001.3.pt\", \"bytes\": 6, \"tensors\": 0, " DIGEST "}"
#define ONE(file) "{" HEAD TIME "\"world_size\": 1, \"files\": [" file "], \"user\": {}}"

static struct pen_error err;

static int parse(const char *text, struct pen_checkpoint **made)
{
	memset(&err, 0, sizeof(err));
	return manifest_parse("m", text, strlen(text), 7, made, &err);
}

TEST(what_is_right_is_read)
{
	struct pen_checkpoint *made;

	CHECK_EQ(parse("{" HEAD TIME "\"user\": {\"a\": [1, {\"b\": null}]}, \"world_size\": 2, "
		       "\"files\": [" FILE_0 ", " FILE_1 "]}", &made), 0);
	CHECK_EQ(made->step, 7);
	CHECK_EQ(made->world_size, 2);
	CHECK_EQ(made->bytes, 11);
	CHECK_EQ(made->file_count, 2);
	CHECK_TEXT(made->files[1].name, "rank-00001.3.pt");
	CHECK_TEXT(made->files[0].digest, "xxh3:0123456789abcdef");
	CHECK_EQ(made->files[0].tensors, 2);
	CHECK_TEXT(made->time, "2026-11-17T02:30:00Z");
	CHECK_TEXT(made->user, "{\"a\": [1, {\"b\": null}]}");
	CHECK_EQ(made->user_length, strlen(made->user));
	free(made);
}

static void refuse(const char *text, const char *words)
{
	struct pen_checkpoint *made;
	int rc = parse(text, &made);

	if (rc != -EBADMSG || made || !strstr(err.message, words) || !err.hint[0]) {
		fprintf(stderr, "%s\n gave %d, \"%s\" instead of \"%s\"\n", text, rc, err.message,
			words);
		exit(1);
	}
}

TEST(each_way_to_be_wrong_has_its_words)
{
	static const struct { const char *text, *words; } cases[] = {
		{ "", "ends in the middle" },
		{ "[]", "not a JSON object" },
		{ "{}", "has no \"format\"" },
		{ ONE(FILE_0) "x", "the end should be" },
		{ "{" HEAD HEAD TIME "\"world_size\": 1}", "\"format\" twice" },
		{ "{" HEAD TIME "\"files\": [" FILE_0 "], \"user\": {}}", "no \"world_size\"" },
		{ "{" HEAD TIME "\"more\": 1}", "\"more\", which nobody knows" },
		{ "{\"format\": \"x\", \"version\": 1, \"step\": 7, " TIME "\"world_size\": 1, "
		  "\"files\": [], \"user\": {}}", "is not \"penstock-checkpoint\"" },
		{ "{\"format\": \"penstock-checkpoint\", \"version\": 2, \"step\": 7, " TIME
		  "\"world_size\": 1, \"files\": [], \"user\": {}}", "version 2" },
		{ "{\"format\": \"penstock-checkpoint\", \"version\": 1, \"step\": 8, " TIME
		  "\"world_size\": 1, \"files\": [], \"user\": {}}", "of step 8, and lies" },
		{ "{" HEAD "\"time\": \"now\", \"world_size\": 1, \"files\": [" FILE_0
		  "], \"user\": {}}", "\"time\" is none like" },
		{ "{" HEAD TIME "\"world_size\": 0, \"files\": [], \"user\": {}}",
		  "\"world_size\" is 0" },
		{ "{" HEAD TIME "\"world_size\": 100001, \"files\": [], \"user\": {}}",
		  "no whole number up to 100000" },
		{ "{" HEAD TIME "\"world_size\": 2, \"files\": [" FILE_0 "], \"user\": {}}",
		  "1 files, and 2 ranks" },
		{ ONE(FILE_0 ", " FILE_1), "more files than ranks" },
		{ "{" HEAD TIME "\"world_size\": 2, \"files\": [" FILE_0 ", " FILE_0
		  "], \"user\": {}}", "file 1 does not have the name" },
		{ "{" HEAD TIME "\"world_size\": 1, \"files\": {}, \"user\": {}}", "no list" },
		{ "{" HEAD TIME "\"world_size\": 1, \"files\": [" FILE_0 "], \"user\": 1}",
		  "\"user\" is no JSON object" },
		{ ONE("1"), "a file is not a JSON object" },
		{ ONE("{\"name\": \"rank-00000.pt\", \"bytes\": 5, \"tensors\": 2}"),
		  "no \"digest\"" },
		{ ONE("{\"name\": \"rank-00000.pt\", \"bytes\": 5, \"tensors\": 2, "
		      "\"digest\": \"xxh3:0123456789ABCDEF\"}"), "\"digest\" of file 0" },
		{ ONE("{\"name\": \"rank-00000.pt\", \"bytes\": -1, \"tensors\": 2, " DIGEST "}"),
		  "\"bytes\" of a file is no whole number" },
		{ ONE("{\"name\": \"rank-00000.pt\", \"bytes\": 9223372036854775808, "
		      "\"tensors\": 2, " DIGEST "}"), "\"bytes\" of a file is no whole" },
		{ "{" HEAD TIME "\"world_size\": 2, \"files\": ["
		  "{\"name\": \"rank-00000.pt\", \"bytes\": 9223372036854775807, \"tensors\": 0, "
		  DIGEST "}, " FILE_1 "], \"user\": {}}", "sizes of its files are too large" },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		refuse(cases[i].text, cases[i].words);
}

TEST(a_file_has_its_own_name_and_no_other)
{
	static const char *const names[] = {
		"", ".", "..", "/etc/passwd", "../rank-00000.pt", "a/rank-00000.pt", "rank-0.pt",
		"rank-000000.pt", "rank-00001.pt", "rank-00000.0.pt", "rank-00000.01.pt",
		"rank-00000.-1.pt", "rank-00000.1234567890.pt", "rank-+0000.pt", "rank- 0000.pt",
		"rank-00000.pt ", "rank-00000.ptx", "rank-00000", "manifest.json",
		"rank-00000.pt\\u0000x", "rank-00000.\\u0031.pt.pt",
		"rank-00000.pt/../../../../../../../../../../etc/passwd",
	};
	char text[600];

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		snprintf(text, sizeof(text), "{" HEAD TIME "\"world_size\": 1, \"user\": {}, "
			 "\"files\": [{\"name\": \"%s\", \"bytes\": 5, \"tensors\": 2, " DIGEST
			 "}]}", names[i]);
		refuse(text, "does not have the name");
	}
}

TEST(names_of_steps_are_those_that_their_numbers_make)
{
	static const uint64_t numbers[] = { 0, 7, 99999999, 100000000, INT64_MAX };
	static const char *const wrong[] = {
		"step-7", "step-000000007", "step-", "step--0000001", "step-0000000x", "step",
		"Step-00000007", "step-00000007/", "step-9223372036854775808", "step-00000007.tmp",
	};
	char name[MANIFEST_STEP_NAME];
	uint64_t step;

	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
		manifest_step_name(numbers[i], name);
		CHECK(manifest_step_parse(name, &step));
		CHECK_EQ(step, numbers[i]);
	}
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		CHECK(!manifest_step_parse(wrong[i], &step));
}

static int write_with(const char *user, const char *name, char **text, size_t *size)
{
	struct pen_checkpoint_file file = { .bytes = 5, .tensors = 2,
					    .digest = "xxh3:0123456789abcdef" };
	struct pen_checkpoint made = { .step = 7, .world_size = 1, .files = &file, .file_count = 1,
				       .user = user, .user_length = strlen(user) };

	strcpy(file.name, name);
	manifest_time(1794882600, made.time);
	return manifest_write(&made, text, size, &err);
}

TEST(what_is_written_is_read_back)
{
	struct pen_checkpoint *made;
	char *text;
	size_t size;

	CHECK_EQ(write_with("{\"lr\": 1e-3}", "rank-00000.pt", &text, &size), 0);
	CHECK_EQ(manifest_parse("m", text, size, 7, &made, &err), 0);
	CHECK_TEXT(made->user, "{\"lr\": 1e-3}");
	CHECK_TEXT(made->time, "2026-11-17T02:30:00Z");
	free(made);
	free(text);
}

TEST(values_that_would_change_the_manifest_are_refused)
{
	static const char *const users[] = {
		"", "1", "[]", "{} ", "{}, \"step\": 7", "{}}", "{", "{\"a\": NaN}",
		"{\"a\": 1e999}",
	};
	char *text;
	size_t size;

	for (size_t i = 0; i < sizeof(users) / sizeof(users[0]); i++) {
		CHECK_EQ(write_with(users[i], "rank-00000.pt", &text, &size), -EINVAL);
		CHECK(err.message[0]);
	}
	CHECK_EQ(write_with("{}", "../rank-00000.pt", &text, &size), -EINVAL);
}

TEST_MAIN

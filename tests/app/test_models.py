"""GET /v1/models: one model under each of its names."""

from tests.app.servers import in_process


async def test_every_name_is_listed_and_can_be_asked_for():
    async with in_process(served_model_name=("org/tiny", "alias"), max_model_len=64) as server:
        listed = (await server.client.get("/v1/models")).json()
        one = (await server.client.get("/v1/models/org/tiny")).json()

    assert "list" == listed["object"]
    assert ["org/tiny", "alias"] == [model["id"] for model in listed["data"]]
    assert ("model", 64, "octavo-tiny") == (one["object"], one["max_model_len"], one["root"])
    assert one == listed["data"][0]


async def test_any_other_name_is_not_found():
    async with in_process() as server:
        response = await server.client.get("/v1/models/nobody")

    assert (404, "model_not_found") == (response.status_code, response.json()["error"]["code"])
